"""Decide whether a job fits its devices, and find changes with which it would."""

from collections.abc import Callable, Iterator

import msgspec

from tlt.memory_plan.items_of_device import device_bytes, device_items, spread_over
from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.memory_items import Item, Phase, peak_bytes, peak_items, peak_phase
from tlt.memory_plan.planned_devices import DevicePlan

# fewer slots decode too slowly, and shorter contexts are too short for reasoning
_LEAST_SLOTS, _LEAST_CONTEXT = 4, 2048
_MORE_HOSTS = (2, 3, 4, 6, 8, 12, 16)


class Remedy(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and what a device then takes."""

    change: str
    bytes: int
    fits: bool


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A job and its division over devices."""

    job: JobMemory
    spread: Spread

    @property
    def bytes(self) -> int:
        return device_bytes(self.job, self.spread)


# a change's name, and the case with it
_Changed = tuple[str, Case]


def find_remedies(job: JobMemory, devices: DevicePlan, spread: Spread) -> tuple[Remedy, ...]:
    """Return helpful changes, the most helpful first; then all of them together, and more hosts."""
    case = Case(job=job, spread=spread)
    before, budget = case.bytes, devices.budget

    def remedy(change: str, changed: Case) -> Remedy:
        return Remedy(change=change, bytes=changed.bytes, fits=changed.bytes <= budget)

    changes = [pair for pair in _changes(case, devices) if pair[1].bytes < before]
    found = sorted((remedy(*pair) for pair in changes), key=lambda each: each.bytes)
    together = case
    for _, changed in changes:
        together = _joined(case, together, changed)
    if len(changes) > 1:
        found.append(remedy("all of these together", together))
    more = _more_hosts(case, devices)
    if more is None and not together.bytes <= budget:
        more = _more_hosts(together, devices)
        more = None if more is None else (f"all of these, and {more[0]}", more[1])
    return (*found, *([] if more is None else [remedy(*more)]))


def _changes(case: Case, devices: DevicePlan) -> Iterator[_Changed]:
    job, spread = case.job, case.spread
    if spread.shards < devices.total and job.can_be_sharded:
        change = f"shard the learner over {devices.total} devices (algorithm.shards: all)"
        yield change, _respread(case, shards=devices.total)
    widths = [
        n
        for n in range(spread.tensor_parallel + 1, devices.devices + 1)
        if devices.devices % n == 0 and job.policy.kv_heads % n == 0
    ]
    if widths:
        width = _first_fitting(widths, devices, lambda n: _divided(case, n))
        engine = "" if job.engine == "sglang" else "rollout.engine: sglang, "
        change = f"{engine}rollout.tensor_parallel: {width}, and workers of {width} ranks"
        yield change, _divided(case, width)
    yield from _spec_changes(case, devices)
    if job.reward_models:
        change = "reward.device: a device that no worker has, or cpu"
        yield change, _respecified(case, reward_models=())
    if job.trains_drafter:
        yield "drafter.train: off", _respecified(case, trains_drafter=False)
    if job.drafts:
        yield "speculation.mode: off", _without_speculation(case)


def _spec_changes(case: Case, devices: DevicePlan) -> Iterator[_Changed]:
    job = case.job
    if not job.gradient_checkpointing:
        changed = _respecified(case, gradient_checkpointing=True)
        yield "algorithm.gradient_checkpointing: true", changed
    elif not job.offload and case.spread.device == "cuda":
        yield "algorithm.gradient_checkpointing: offload", _respecified(case, offload=True)
    if job.engine_width > 2:
        yield "policy.dtype: bfloat16", _respecified(case, engine_width=2)
    if job.microbatch_tokens > job.max_context:
        changed = _respecified(case, microbatch_tokens=job.max_context)
        yield f"algorithm.microbatch_tokens: {job.max_context}", changed
    fewer = _halves(job.slots, _LEAST_SLOTS)
    if fewer:
        slots = _first_fitting(fewer, devices, lambda n: _respecified(case, slots=n))
        yield f"rollout.slots: {slots}", _respecified(case, slots=slots)
    shorter = _halves(job.max_context, _LEAST_CONTEXT)
    if shorter:
        context = _first_fitting(shorter, devices, lambda n: _respecified(case, max_context=n))
        yield f"policy.max_context: {context}", _respecified(case, max_context=context)


def _without_speculation(case: Case) -> Case:
    return _respecified(
        case, drafts=0, lengths=(0,), captured=0, drafter=None, trains_drafter=False
    )


def _first_fitting(values: list[int], devices: DevicePlan, changed: Callable[[int], Case]) -> int:
    """Return the first value with which a device holds the job; the last one if none does."""
    return next((n for n in values if changed(n).bytes <= devices.budget), values[-1])


def _halves(value: int, least: int) -> list[int]:
    """List half of a value, half of that, and so on, down to `least`."""
    found: list[int] = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _more_hosts(case: Case, devices: DevicePlan) -> _Changed | None:
    """Return the fewest times more hosts with which a learner that is sharded over all fits."""
    if devices.type == "cpu" or not case.job.can_be_sharded:
        return None
    for times in _MORE_HOSTS:
        more = msgspec.structs.replace(devices, hosts=devices.hosts * times)
        spread = spread_over(more, more.total, case.spread.tensor_parallel)
        changed = Case(job=case.job, spread=spread)
        if changed.bytes <= devices.budget:
            return f"the learner sharded over {more.total} devices ({more.name})", changed
    return None


def _divided(case: Case, devices: int) -> Case:
    """Let devices share an engine, which only SGLang can do."""
    job = msgspec.structs.replace(case.job, engine="sglang")
    return Case(job=job, spread=msgspec.structs.replace(case.spread, tensor_parallel=devices))


def _respread(case: Case, **changes: int) -> Case:
    spread = msgspec.structs.replace(case.spread, **changes)
    return Case(job=case.job, spread=spread)


def _respecified(case: Case, **changes: object) -> Case:
    return Case(job=msgspec.structs.replace(case.job, **changes), spread=case.spread)


def _joined(original: Case, together: Case, changed: Case) -> Case:
    """Add to `together` what `changed` has other than the original."""
    job = _differences(original.job, changed.job)
    spread = _differences(original.spread, changed.spread)
    return Case(
        job=msgspec.structs.replace(together.job, **job),
        spread=msgspec.structs.replace(together.spread, **spread),
    )


def _differences(original: msgspec.Struct, changed: msgspec.Struct) -> dict[str, object]:
    pairs = msgspec.structs.asdict(original), msgspec.structs.asdict(changed)
    return {name: value for name, value in pairs[1].items() if value != pairs[0][name]}


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    devices: DevicePlan
    spread: Spread
    items: tuple[Item, ...]
    # the phase in which the most is taken, and how much that is
    peak: Phase
    total: int
    budget: int
    # parameters, gradients and moments of the learner
    learner_state: int
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool:
        return self.total <= self.budget

    @property
    def largest(self) -> Item:
        """Return the largest of the items that are held when the most is held."""
        return max(peak_items(self.items), key=lambda item: item.bytes)


def make_plan(job: JobMemory, devices: DevicePlan, shards: int, tensor_parallel: int) -> MemoryPlan:
    """Plan a job over all devices of the plan."""
    spread = spread_over(devices, shards, tensor_parallel)
    items = device_items(job, spread)
    total = peak_bytes(items)
    fits = total <= devices.budget
    return MemoryPlan(
        devices=devices,
        spread=spread,
        items=items,
        peak=peak_phase(items),
        total=total,
        budget=devices.budget,
        learner_state=(4 * job.learner_weights + 12 * job.trained) // shards,
        remedies=() if fits else find_remedies(job, devices, spread),
    )
