"""Lower the sizes that a spec leaves open until a device holds the job."""

from collections.abc import Callable

import msgspec

from tlt.memory_plan.items_of_device import device_bytes
from tlt.memory_plan.job_sizes import JobMemory, Spread

# tokens of a pass, on each kind of device: more take memory, and are hardly faster
FAST_TOKENS = {"cuda": 16384, "cpu": 2048}
# fewer are clearly slower; a longer answer is a pass of its own anyway
_LEAST_TOKENS = 512
# SGLang's cache holds at least half of what slots would take at worst: while an answer is written,
# it takes half of its final length on average; when the cache is full, SGLang retracts answers
_LEAST_CACHE = 2


def fit_sizes(
    wanted: JobMemory, spread: Spread, budget: int, *, slots: bool, cache: bool, microbatch: bool
) -> JobMemory:
    """Return the job with the largest sizes up to the wanted ones; True marks those left open.

    Slots come first, because few of them cost more time than a small cache or small passes. What
    doesn't fit in any size is left to the memory plan, which says what helps.
    """
    job = wanted
    least = min(job.microbatch_tokens, _LEAST_TOKENS) if microbatch else job.microbatch_tokens
    beside = msgspec.structs.replace(job, microbatch_tokens=least)
    cache = cache and job.engine == "sglang"
    if slots:
        beside = _with_fitting_slots(beside, spread, budget, cache)
        job = msgspec.structs.replace(job, slots=beside.slots)
    if cache:
        tokens = _fitting_cache(beside, spread, budget)
        job = msgspec.structs.replace(job, cache_tokens=tokens)
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


def _with_fitting_slots(job: JobMemory, spread: Spread, budget: int, cache: bool) -> JobMemory:
    """Return the job with the most slots that fit, with the least cache if it is left open."""

    def fits(slots: int) -> bool:
        tried = msgspec.structs.replace(job, slots=slots)
        if cache:
            tokens = max(tried.pool_tokens // _LEAST_CACHE, job.request_positions)
            tried = msgspec.structs.replace(tried, cache_tokens=tokens)
        return device_bytes(tried, spread) <= budget

    return msgspec.structs.replace(job, slots=_most(1, job.slots, fits))


def _fitting_cache(job: JobMemory, spread: Spread, budget: int) -> int:
    """Return the most tokens that fit; at least those of one request."""

    def fits(tokens: int) -> bool:
        tried = msgspec.structs.replace(job, cache_tokens=tokens)
        return device_bytes(tried, spread) <= budget

    return _most(job.request_positions, max(job.pool_tokens, job.request_positions), fits)


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, which bisection finds; `least` if none does."""
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least
