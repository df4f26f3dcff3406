"""Describe a job to the memory planner, from its spec and the config.json of its models."""

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from tlt.base.strategies import Draft, max_drafts
from tlt.errors import ConfigError
from tlt.memory_plan import (
    FAST_TOKENS,
    DrafterShape,
    JobMemory,
    LoraShape,
    ModelShape,
    RewardModelMemory,
)
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import DecoderConfig, require_divisible, weight_shapes
from tlt.models.drafter_folder import read_drafter_config
from tlt.models.eagle_drafter import DrafterConfig
from tlt.models.hub_cache import find_hub_policy
from tlt.models.safetensors_header import read_folder_shapes
from tlt.policies.algorithm.activation_checkpointing import checkpoints_activations
from tlt.protocol.shared_values import SizingFacts
from tlt.rewards.kinds.reward_model_folder import read_folder
from tlt.spec.config import AlgorithmSpec, JobSpec, LoraSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for
from tlt.trainer.drafter.samples import state_layers

_WIDTHS = {"float32": 4, "bfloat16": 2}


def describe_job(spec: JobSpec, device: Literal["cuda", "cpu"], facts: SizingFacts) -> JobMemory:
    """Describe it with the wanted sizes where the spec leaves them open.

    No weights are read, so that folders need not hold any.
    """
    hub_policy = find_hub_policy(spec.policy, weights=False)
    folder = Path(spec.policy.path if hub_policy is None else hub_policy.folder)
    if not folder.is_dir():
        raise ConfigError(f"policy.path: {folder}: no such folder; its config.json is needed")
    config = read_config(folder)
    width = spec.rollout.tensor_parallel
    require_divisible(width, config.kv_heads, config.intermediate, "policy")
    drafter = _drafter_of(spec, config)
    if drafter is not None:
        require_divisible(
            width, drafter.kv_heads, drafter.intermediate, "drafter", drafter.hot_tokens
        )
    algorithm, rollout, speculation = spec.algorithm, spec.rollout, spec.speculation
    policy = policy_shape(config)
    return JobMemory(
        policy=policy,
        engine=rollout.engine,
        engine_width=_engine_width(spec, device),
        slots=facts.most_slots(rollout) if rollout.slots == "auto" else rollout.slots,
        max_context=min(config.max_positions, spec.policy.max_context or config.max_positions),
        cache_tokens=facts.most_cached(rollout),
        drafts=speculation.longest,
        lengths=tuple(sorted({0, *map(max_drafts, speculation.arms)})),
        captured=_captured(spec, drafter, config.layers),
        drafter=None if drafter is None else drafter_shape(drafter),
        trains_drafter=spec.drafter.train != "off",
        drafter_megabytes=spec.drafter.megabytes,
        microbatch_tokens=_wanted_tokens(algorithm, device, facts),
        gradient_checkpointing=checkpoints_activations(
            algorithm.gradient_checkpointing, policy.weights
        ),
        offload=algorithm.gradient_checkpointing == "offload" and device == "cuda",
        bfloat16=_computes_in_bfloat16(spec, device),
        lora=lora_shape(spec.policy.lora, config),
        frozen=count_frozen(spec.policy.freeze, config),
        reference=algorithm.kl_coefficient > 0 and spec.policy.lora is None,
        reward_models=tuple(_reward_models(spec, device)),
        answers=spec.issued_answers,
    )


def _wanted_tokens(
    algorithm: AlgorithmSpec, device: Literal["cuda", "cpu"], facts: SizingFacts
) -> int:
    if algorithm.microbatch_tokens != "auto":
        return algorithm.microbatch_tokens
    return FAST_TOKENS[device] if facts.chosen is None else facts.chosen.microbatch_tokens


def policy_shape(config: DecoderConfig) -> ModelShape:
    return ModelShape(
        vocabulary=config.vocabulary,
        hidden=config.hidden,
        intermediate=config.intermediate,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        tied=config.tied,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        mlp_bias=config.mlp_bias,
        head_norms=config.head_norms,
    )


def drafter_shape(config: DrafterConfig) -> DrafterShape:
    return DrafterShape(
        layout=config.layout,
        hidden=config.hidden,
        intermediate=config.intermediate,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocabulary,
        captured=len(config.captured),
        own_head=config.own_head,
        hot_tokens=config.hot_tokens or 0,
    )


def lora_shape(lora: LoraSpec | None, config: DecoderConfig) -> LoraShape | None:
    """Count the matrices that peft adds an adapter to."""
    if lora is None:
        return None
    found: dict[str, tuple[int, int, int]] = {}
    for name, shape in weight_shapes(config).items():
        module = name.removesuffix(".weight")
        targets = (module,) if isinstance(lora.targets, str) else lora.targets
        adapted = any(f".{module}".endswith(f".{target}") for target in targets)
        if adapted and module.endswith("_proj"):
            outputs, inputs = shape
            matrix = module.rpartition(".")[2]
            found[matrix] = (found.get(matrix, (0,))[0] + 1, outputs, inputs)
    return LoraShape(rank=lora.rank, matrices=found)


def count_frozen(patterns: tuple[str, ...], config: DecoderConfig) -> int:
    return sum(
        math.prod(shape)
        for name, shape in weight_shapes(config).items()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def _drafter_of(spec: JobSpec, policy: DecoderConfig) -> DrafterConfig | None:
    """Return the drafter that the engine holds: the named one's shape, or that of a new one."""
    path = spec.drafter.path
    if path is not None and any(isinstance(arm, Draft) for arm in spec.speculation.arms):
        if not Path(path).is_dir():
            raise ConfigError(f"drafter.path: {path}: no such folder; its config.json is needed")
        return read_drafter_config(Path(path), policy.layers)
    # SGLang starts with a drafter whenever it speculates, be it one that never proposes
    needed = spec.rollout.engine == "sglang" and spec.speculation.mode != "off"
    if needed or spec.drafter.train != "off":
        return drafter_config_for(policy, spec.drafter.layout, spec.drafter.most_tokens)
    return None


def _reward_models(spec: JobSpec, device: Literal["cuda", "cpu"]) -> Iterator[RewardModelMemory]:
    """Yield those that compute where workers do: on the first of the devices, if none is named."""
    for reward in spec.rewards:
        place = reward.device or device
        if reward.kind != "model" or not place.startswith(device):
            continue
        sizes, folder = read_folder(reward), Path(reward.path or "")
        width = _WIDTHS["bfloat16" if device == "cuda" else "float32"]
        yield RewardModelMemory(
            device=place,
            weights=sum(map(math.prod, read_folder_shapes(folder).values())),
            width=width if reward.dtype == "auto" else _WIDTHS[reward.dtype],
            hidden=sizes.get("hidden_size", 0),
            intermediate=sizes.get("intermediate_size", 0),
            batch_tokens=reward.batch_tokens,
            copies=reward.workers or 1,
        )


def _captured(spec: JobSpec, drafter: DrafterConfig | None, layers: int) -> int:
    """Count the layers whose states the engine keeps, as `engine_factory` chooses them."""
    if drafter is None:
        return 0
    if spec.rollout.engine == "sglang" or spec.drafter.train != "off":
        return len(state_layers(drafter, layers))
    return len(drafter.captured)


def _engine_width(spec: JobSpec, device: Literal["cuda", "cpu"]) -> int:
    """Return the bytes of a number in the engine; `auto` is bfloat16 on GPUs."""
    if spec.policy.dtype == "auto":
        return 2 if device == "cuda" else 4
    return _WIDTHS[spec.policy.dtype]


def _computes_in_bfloat16(spec: JobSpec, device: Literal["cuda", "cpu"]) -> bool:
    """Take `auto` for what it measures to be faster on all but old GPUs."""
    precision = spec.algorithm.precision
    return precision == "bfloat16" or (precision == "auto" and device == "cuda")
