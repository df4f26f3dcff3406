"""Choose the sizes that a job's spec leaves open, from what this rank's device has free.

An engine decodes more tokens a second the more answers run at once, so it gets as many slots as it
can use or hold.
"""

import os
import shutil
from pathlib import Path

import msgspec
import torch

from tlt.base.available_memory import available_memory
from tlt.errors import ConfigError
from tlt.memory_plan import DevicePlan, JobMemory, Spread, fit_sizes, most_tap_slots
from tlt.protocol.commands import OpenJob
from tlt.protocol.rank_messages import RankSetup
from tlt.protocol.shared_values import ChosenSizes, SizingFacts
from tlt.ranks.engine_requirements import context_of, free_device_bytes
from tlt.ranks.job_sizes_from_spec import describe_job
from tlt.spec.config import JobSpec


class SizeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a job, the wanted ones and those that fit a device."""

    wanted: JobMemory
    fitting: JobMemory
    budget: int
    # fewer slots than wanted, whose hidden states have room in the host's shared memory
    shared_slots: int | None = None
    # the spec names no slots
    slots_open: bool = True

    @property
    def sizes(self) -> ChosenSizes:
        job = self.fitting
        return ChosenSizes(
            slots=job.slots,
            microbatch_tokens=job.microbatch_tokens,
            cache_tokens=job.pool_tokens if job.engine == "sglang" else None,
        )

    @property
    def why(self) -> str:
        """Say what limits the sizes."""
        wanted, job, limit = self.wanted, self.fitting, f"what {self.budget / 1e9:.1f} GB hold"
        slots = ""
        if self.slots_open:
            reason = limit if job.slots < wanted.slots else "its share of a rollout batch"
            if job.slots == self.shared_slots:
                reason = "whose hidden states half of the shared memory holds"
            slots = f" ({reason})"
        lowered = job.microbatch_tokens < wanted.microbatch_tokens
        return (
            f"{job.slots} answers at once{slots}{self._cache}, "
            f"{job.microbatch_tokens} tokens a pass{f' ({limit})' if lowered else ''}"
        )

    @property
    def _cache(self) -> str:
        job = self.fitting
        worst = job.slots * job.request_positions
        if job.engine != "sglang" or job.pool_tokens == worst:
            return ""
        return f", {job.pool_tokens} tokens cached of the {worst} that they may have"


def choose_sizes(
    spec: JobSpec,
    facts: SizingFacts,
    device: DevicePlan,
    spread: Spread,
    shared: int | None = None,
) -> SizeChoice:
    """Choose sizes for a device, and for a tap of at most `shared` bytes if there is one."""
    wanted = describe_job(spec, device.type, facts)
    slots_open, most = spec.rollout.slots == "auto", wanted.slots
    if shared is not None and slots_open:
        most = min(most, most_tap_slots(wanted, shared))
    fitting = fit_sizes(
        msgspec.structs.replace(wanted, slots=most),
        spread,
        device.budget,
        slots=slots_open,
        cache=spec.rollout.cache_tokens == "auto",
        microbatch=spec.algorithm.microbatch_tokens == "auto",
    )
    return SizeChoice(
        wanted=wanted,
        fitting=fitting,
        budget=device.budget,
        shared_slots=most if most < wanted.slots else None,
        slots_open=slots_open,
    )


def limit_context(spec: JobSpec, facts: SizingFacts) -> JobSpec:
    """Lower the context to the longest prompt and answer, if both are known.

    What an environment says isn't.
    """
    if not facts.longest_prompt or spec.environment:
        return spec
    context = min(context_of(spec), facts.longest_prompt + _longest_answer(spec))
    policy = msgspec.structs.replace(spec.policy, max_context=context)
    return msgspec.structs.replace(spec, policy=policy)


def choose_for_rank(setup: RankSetup, opened: OpenJob) -> tuple[OpenJob, SizeChoice | None]:
    """Return the command with the sizes in its spec; without a choice if they were there."""
    spec, facts = opened.spec, opened.sizing
    if not spec.leaves_sizes_open:
        return opened, None
    if facts is msgspec.UNSET:
        facts = SizingFacts(ranks=len(setup.cores) or 1, answers=spec.issued_answers)
    spec = limit_context(spec, facts)
    device = _device_of(setup)
    spread, shared = _spread(spec, facts, device), _shared_bytes(setup, spec, facts)
    try:
        choice = choose_sizes(spec, facts, device, spread, shared)
    except ConfigError:
        # the engine refuses a drafter that can't be used, and the job goes on without it
        choice = choose_sizes(_with_new_drafter(spec), facts, device, spread, shared)
    return msgspec.structs.replace(opened, spec=_with_sizes(spec, choice.sizes)), choice


def _shared_bytes(setup: RankSetup, spec: JobSpec, facts: SizingFacts) -> int | None:
    """Return an engine's part of half of the free shared memory, if all engines are on this host.

    Policies, drafters and answers on their way take the other half. None: it needs no tap.
    """
    if spec.rollout.engine != "sglang":
        return None
    flight, engines = Path(setup.flight), max(1, facts.ranks // spec.rollout.tensor_parallel)
    flight.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(flight).free // 2 // engines


def _with_new_drafter(spec: JobSpec) -> JobSpec:
    """Leave room for a drafter of the usual shape instead of the named one."""
    drafter = msgspec.structs.replace(spec.drafter, path=None, train="always")
    return msgspec.structs.replace(spec, drafter=drafter)


def _longest_answer(spec: JobSpec) -> int:
    """Return the most tokens of an answer, those of evaluations included."""
    limits = [each.max_new_tokens or 0 for each in spec.data.evaluation_sets.values()]
    return max([spec.rollout.max_new_tokens, *limits])


def _with_sizes(spec: JobSpec, sizes: ChosenSizes) -> JobSpec:
    replace = msgspec.structs.replace
    cache = spec.rollout.cache_tokens if sizes.cache_tokens is None else sizes.cache_tokens
    rollout = replace(spec.rollout, slots=sizes.slots, cache_tokens=cache)
    algorithm = replace(spec.algorithm, microbatch_tokens=sizes.microbatch_tokens)
    return replace(spec, rollout=rollout, algorithm=algorithm)


def _device_of(setup: RankSetup) -> DevicePlan:
    """Describe the rank's device: its free memory, or its cores' part of the host's."""
    device = torch.device(setup.device)
    free = free_device_bytes(device)
    if free is not None:
        return DevicePlan(hosts=1, devices=1, memory=free, kind=setup.device)
    cores = len(setup.cores[setup.rank]) if setup.cores else 0
    hosts = os.cpu_count() or 1
    free = available_memory() * min(cores or hosts, hosts) // hosts
    return DevicePlan(hosts=1, devices=1, memory=free, kind=setup.device, type="cpu")


def _spread(spec: JobSpec, facts: SizingFacts, device: DevicePlan) -> Spread:
    shards = facts.ranks if spec.algorithm.shards == "all" else spec.algorithm.shards
    return Spread(
        ranks=facts.ranks,
        shards=shards,
        tensor_parallel=spec.rollout.tensor_parallel,
        device=device.type,
    )
