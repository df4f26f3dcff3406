"""Start the engine that a job's spec names, over the policy in its folder."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from tlt.config import JobSpec, SpeculationSpec
from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.errors import TltError
from tlt.id_types import NAMED, PolicyVersion
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit
from tlt.models.tokenizer import Tokenizer
from tlt.policies.keyed_random import mix
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.control_runs import ControlRunPolicy
from tlt.policies.speculation.fixed_strategy import FixedPolicy
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.ranks.rank_job_context import RankJob
from tlt.strategies import Draft
from tlt.trainer.drafter.initial_drafter import drafter_config_for
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
            return StartedEngine(engine=_start_sglang(job, tokenizer))


def drafter_config(spec: JobSpec, named: Drafter | None) -> DrafterConfig:
    """Return the shape of the drafter that the job trains: the named one's, or a new one's."""
    if named is not None:
        return named.config
    return drafter_config_for(read_config(Path(spec.policy.path)), spec.drafter.layout)


def context_of(spec: JobSpec) -> int:
    """Return the most tokens that a prompt and its answer may have together."""
    policy = spec.policy
    positions = read_config(Path(policy.path)).max_positions
    return min(positions, policy.max_context or positions)


def _start_native(job: RankJob, tokenizer: Tokenizer) -> StartedEngine:
    spec = job.spec
    model = load_decoder(Path(spec.policy.path), getattr(torch, spec.policy.dtype))
    drafter, complaint = _load_named_drafter(spec)
    captured: tuple[int, ...] = ()
    if spec.drafter.train != "off":
        captured = state_layers(drafter_config(spec, drafter), model.config.layers)
    elif drafter is not None:
        captured = drafter.config.captured
    engine = NativeEngine(
        model,
        tokenizer.decode,
        spec.rollout.slots,
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
        # With the same random numbers all ranks would explore in the same decode steps.
        setup = job.setup
        seed = mix(spec.seed, *setup.worker.encode(), setup.incarnation, setup.rank)
        engine.speculation.set_policy(strategy_policy(spec.speculation), seed)
    return StartedEngine(engine=engine, drafter=drafter, complaint=complaint)


def strategy_policy(speculation: SpeculationSpec) -> StrategyPolicy:
    """Return the policy that chooses each decode step's strategy, control runs included."""
    fixed = speculation.strategy
    policy = AdaptivePolicy() if fixed is None else FixedPolicy(fixed)
    share = speculation.control_share
    return ControlRunPolicy(policy, share) if share > 0 else policy


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
    if complaint is not None:
        return None, f"{path}: the drafter does not fit the policy: {complaint}"
    return drafter, None


def _start_sglang(job: RankJob, tokenizer: Tokenizer) -> Engine:
    # Importing SGLang changes the process, so only a job that uses it does.
    from tlt.engine.sglang import start_engine_with_tap

    spec = job.spec
    job.flight.mkdir(parents=True, exist_ok=True)
    return start_engine_with_tap.start_engine(
        Path(spec.policy.path),
        tokenizer.decode,
        spec.rollout.slots,
        context_of(spec),
        job.device,
        getattr(torch, spec.policy.dtype),
        PolicyVersion(0),
        Path(tempfile.mkdtemp(prefix="sglang-", dir=job.flight)),
        seed=spec.seed,
        stuck_seconds=spec.workers.stuck_seconds,
    )
