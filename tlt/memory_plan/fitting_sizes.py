"""Lower the sizes that a spec leaves open until a device holds the job."""

import msgspec

from tlt.memory_plan.items_of_device import device_bytes
from tlt.memory_plan.job_sizes import JobMemory, Spread

# tokens of a pass, on each kind of device: more take memory, and are hardly faster
FAST_TOKENS = {"cuda": 16384, "cpu": 2048}
# fewer are clearly slower; a longer answer is a pass of its own anyway
_LEAST_TOKENS = 512


def fit_sizes(
    wanted: JobMemory, spread: Spread, budget: int, *, slots: bool, microbatch: bool
) -> JobMemory:
    """Return the job with the largest sizes up to the wanted ones; True marks those left open.

    Slots come first, because few of them cost more time than small passes. What doesn't fit in any
    size is left to the memory plan, which says what helps.
    """
    job = wanted
    if slots:
        least = min(job.microbatch_tokens, _LEAST_TOKENS) if microbatch else job.microbatch_tokens
        beside = msgspec.structs.replace(job, microbatch_tokens=least)
        job = msgspec.structs.replace(job, slots=_fitting_slots(beside, spread, budget))
    if microbatch:
        tokens = _fitting_tokens(job, spread, budget)
        job = msgspec.structs.replace(job, microbatch_tokens=tokens)
    return job


def _fitting_tokens(job: JobMemory, spread: Spread, budget: int) -> int:
    """Return the wanted number, or what of its halves fits."""
    tokens = job.microbatch_tokens
    while tokens // 2 >= _LEAST_TOKENS:
        tried = msgspec.structs.replace(job, microbatch_tokens=tokens)
        if device_bytes(tried, spread) <= budget:
            break
        tokens //= 2
    return tokens


def _fitting_slots(job: JobMemory, spread: Spread, budget: int) -> int:
    """Return the most slots that fit, which bisection finds; at least 1."""
    least, most = 1, job.slots
    while least < most:
        middle = (least + most + 1) // 2
        tried = msgspec.structs.replace(job, slots=middle)
        if device_bytes(tried, spread) <= budget:
            least = middle
        else:
            most = middle - 1
    return least
