"""Start the engine that a job's spec names, over the policy in its folder."""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tlt.base.id_types import NAMED, PolicyVersion
from tlt.base.strategies import Draft
from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions, without_noise
from tlt.errors import TltError
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import require_divisible
from tlt.models.drafter_folder import load_drafter, save_drafter
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit
from tlt.models.tokenizer import Tokenizer
from tlt.policies.keyed_random import mix
from tlt.policies.speculation.configured_policy import configured_policy
from tlt.ranks.engine_requirements import context_of, engine_dtype, require_room
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import JobSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for, initialise_drafter
from tlt.trainer.drafter.samples import state_layers


@dataclass(frozen=True, kw_only=True)
class StartedEngine:
    """An engine, the drafter that the spec names, and the reason if that can't be used."""

    engine: Engine
    drafter: Drafter | None = None
    complaint: str | None = None


def start_engine(job: RankJob, tokenizer: Tokenizer) -> StartedEngine:
    """Start the job's engine on the rank's device."""
    match job.spec.rollout.engine:
        case "native":
            return _start_native(job, tokenizer)
        case "sglang":
            return _start_sglang(job, tokenizer)


def drafter_config(spec: JobSpec, named: Drafter | None) -> DrafterConfig:
    """Return the shape of the drafter that the job trains: the named one's, or a new one's."""
    if named is not None:
        return named.config
    policy = read_config(Path(spec.policy.path))
    return drafter_config_for(policy, spec.drafter.layout, spec.drafter.most_tokens)


def _start_native(job: RankJob, tokenizer: Tokenizer) -> StartedEngine:
    spec, folder = job.spec, Path(job.spec.policy.path)
    dtype = engine_dtype(spec, job.device)
    drafter, complaint = _load_named_drafter(spec)
    captured: tuple[int, ...] = ()
    if spec.drafter.train != "off":
        captured = state_layers(drafter_config(spec, drafter), read_config(folder).layers)
    elif drafter is not None:
        captured = drafter.config.captured
    require_room(spec, len(captured), dtype, job.device)
    model = load_decoder(folder, dtype)
    engine = NativeEngine(
        model,
        tokenizer.decode,
        spec.rollout.chosen_slots,
        context_of(spec),
        job.device,
        PolicyVersion(0),
        captured=captured,
        arms=spec.speculation.arms,
        ngram_bytes=spec.speculation.ngram_megabytes << 20,
    )
    if drafter is not None:
        engine.speculation.adopt_drafter(NAMED, drafter)
    if spec.speculation.mode != "off":
        speculation = spec.speculation
        make = partial(configured_policy, speculation.strategy, speculation.control_share)
        engine.speculation.set_policy(make, _exploration_seed(job))
    return StartedEngine(engine=engine, drafter=drafter, complaint=complaint)


def _load_named_drafter(spec: JobSpec) -> tuple[Drafter | None, str | None]:
    """Return the drafter that the spec names, or why it can't be used."""
    path = spec.drafter.path
    if path is None or not any(isinstance(arm, Draft) for arm in spec.speculation.arms):
        return None, None
    policy = read_config(Path(spec.policy.path))
    try:
        drafter = load_drafter(Path(path), policy.layers)
    except TltError as error:
        return None, str(error)
    complaint = describe_misfit(drafter, policy)
    reads_last = drafter.config.layout == "eagle3" and policy.layers in drafter.config.captured
    if complaint is None and spec.rollout.engine == "sglang" and reads_last:
        complaint = "it reads what follows the last layer, which SGLang gives no EAGLE-3 drafter"
    if complaint is not None:
        return None, f"{path}: the drafter does not fit the policy: {complaint}"
    return drafter, None


def _start_sglang(job: RankJob, tokenizer: Tokenizer) -> StartedEngine:
    spec, model = job.spec, Path(job.spec.policy.path)
    dtype = engine_dtype(spec, job.device)
    # Importing SGLang changes the process, so only a job that uses it does.
    from tlt.engine.sglang.client import start_engine_with_tap

    job.flight.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sglang-", dir=job.flight))
    drafter, complaint = _load_named_drafter(spec)
    captured: tuple[int, ...] = ()
    speculation: SpeculationOptions | None = None
    if spec.speculation.mode != "off":
        config = drafter_config(spec, drafter)
        width = spec.rollout.tensor_parallel
        require_divisible(width, config.kv_heads, config.intermediate, "drafter", config.hot_tokens)
        captured = state_layers(config, read_config(model).layers)
        speculation = _sglang_speculation(job, drafter, config, folder / "drafter")
    engine = start_engine_with_tap.start_engine(
        model,
        tokenizer.decode,
        spec.rollout.chosen_slots,
        context_of(spec),
        job.device,
        dtype,
        PolicyVersion(0),
        folder,
        seed=spec.seed,
        stuck_seconds=spec.workers.stuck_seconds,
        captured=captured,
        speculation=speculation,
        cores=job.engine_cores,
        cache_tokens=spec.rollout.most_cached,
    )
    return StartedEngine(engine=engine, drafter=drafter, complaint=complaint)


def _sglang_speculation(
    job: RankJob, named: Drafter | None, config: DrafterConfig, folder: Path
) -> SpeculationOptions:
    """Write the drafter that SGLang starts with: the named one, or one that never proposes."""
    speculation = job.spec.speculation
    drafter = named or initialise_drafter(config, torch.ones(1), job.spec.seed)
    save_drafter(drafter, folder)
    return SpeculationOptions(
        algorithm="EAGLE" if config.layout == "eagle" else "EAGLE3",
        drafter=str(folder),
        trained=named is not None,
        hot=config.hot_tokens is not None,
        layers=len(config.captured),
        arms=tuple(dict.fromkeys(map(without_noise, speculation.arms))),
        fixed=None if speculation.strategy is None else without_noise(speculation.strategy),
        control_share=speculation.control_share,
        seed=_exploration_seed(job),
        ngram_bytes=speculation.ngram_megabytes << 20,
    )


def _exploration_seed(job: RankJob) -> int:
    """Return a seed of the rank's own, or all would explore in the same decode steps."""
    setup = job.setup
    return mix(job.spec.seed, *setup.worker.encode(), setup.incarnation, setup.rank)
