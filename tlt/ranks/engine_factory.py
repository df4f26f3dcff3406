"""The engine that a job asks for, over the policy in its folder."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.config import SpeculationSpec
from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.errors import TltError
from tlt.ids import NAMED, PolicyVersion
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit
from tlt.models.model_folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.policies.keyed_random import mix
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.control_runs import ControlRunPolicy
from tlt.policies.speculation.fixed_strategy import FixedPolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.ranks.worker_channel import Load
from tlt.strategies import Draft
from tlt.trainer.drafter.initial_drafter import drafter_config_for
from tlt.trainer.drafter.samples import state_layers


@dataclass(frozen=True, kw_only=True)
class Started:
    engine: Engine
    # the drafter that the job names, and why it goes without, if it does
    drafter: Drafter | None = None
    complaint: str | None = None


def start_engine(load: Load, tokenizer: Tokenizer, device: torch.device) -> Started:
    match load.spec.rollout.engine:
        case "native":
            return _native(load, tokenizer, device)
        case "sglang":
            return Started(engine=_sglang(load, tokenizer, device))


def drafter_config(load: Load, named: Drafter | None) -> DrafterConfig:
    """Of the drafter that the job trains: the one it names, or a new one."""
    if named is not None:
        return named.config
    return drafter_config_for(read_config(Path(load.spec.policy.path)), load.spec.drafter.layout)


def context_of(load: Load) -> int:
    """What a prompt and its answer may fill together."""
    policy = load.spec.policy
    positions = read_config(Path(policy.path)).max_positions
    return min(positions, policy.max_context or positions)


def _native(load: Load, tokenizer: Tokenizer, device: torch.device) -> Started:
    spec = load.spec
    model = load_decoder(Path(spec.policy.path), getattr(torch, spec.policy.dtype))
    drafter, complaint = _drafter(load)
    captured: tuple[int, ...] = ()
    if spec.drafter.train != "off":
        captured = state_layers(drafter_config(load, drafter), model.config.layers)
    elif drafter is not None:
        captured = drafter.config.captured
    engine = NativeEngine(
        model,
        tokenizer.decode,
        spec.rollout.slots,
        context_of(load),
        device,
        PolicyVersion(0),
        captured=captured,
        arms=spec.speculation.arms,
        ngram_bytes=spec.speculation.ngram_megabytes << 20,
    )
    if drafter is not None:
        engine.adopt_drafter(NAMED, drafter)
    if spec.speculation.mode != "off":
        # ranks that drew the same numbers would all measure in the same rounds
        seed = mix(spec.seed, *load.worker.encode(), load.incarnation, load.rank)
        engine.set_strategy_policy(strategy_policy(spec.speculation), seed)
    return Started(engine=engine, drafter=drafter, complaint=complaint)


def strategy_policy(speculation: SpeculationSpec) -> StrategyPolicy:
    fixed = speculation.strategy
    policy = AdaptivePolicy() if fixed is None else FixedPolicy(fixed)
    share = speculation.control_share
    return ControlRunPolicy(policy, share) if share > 0 else policy


def _drafter(load: Load) -> tuple[Drafter | None, str | None]:
    path = load.spec.drafter.path
    if path is None or not any(isinstance(arm, Draft) for arm in load.spec.speculation.arms):
        return None, None
    policy = read_config(Path(load.spec.policy.path))
    try:
        drafter = load_drafter(Path(path), policy.layers)
    except TltError as error:
        return None, str(error)
    complaint = describe_misfit(drafter, policy)
    if complaint is not None:
        return None, f"{path}: the drafter does not fit the policy: {complaint}"
    return drafter, None


def _sglang(load: Load, tokenizer: Tokenizer, device: torch.device) -> Engine:
    # imported for a job that asks for it alone: it changes the process
    from tlt.engine.sglang import engine_startup

    spec = load.spec
    Path(load.flight).mkdir(parents=True, exist_ok=True)
    return engine_startup.start_engine(
        Path(spec.policy.path),
        tokenizer.decode,
        spec.rollout.slots,
        context_of(load),
        device,
        getattr(torch, spec.policy.dtype),
        PolicyVersion(0),
        Path(tempfile.mkdtemp(prefix="sglang-", dir=load.flight)),
        seed=spec.seed,
        stuck_seconds=spec.workers.stuck_seconds,
    )
