"""Compare what can be done against long answers, alone and together, on some numbers of workers.

Seconds are those of a step with answers of average length: a mode that puts long answers off must
not look faster for that.
"""

from collections.abc import Iterable, Iterator, KeysView, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from tlt.simulation.job import Job, Mode, Trained
from tlt.simulation.product_scheduler import ProductScheduler
from tlt.simulation.world import Use, World

# a part pays that makes steps this many times as fast
LEAST_GAIN = 1.05
# shares of groups beyond those needed that are tried
_SURPLUSES = (0.25, 0.5, 1.0)
# groups whose lengths are averaged
_SAMPLE = 4096


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step in one mode."""

    mode: Mode
    workers: int
    seconds: float
    device_seconds: float
    # against synchronous steps without speculation
    speed_up: float = 1.0
    # worker seconds by use
    uses: dict[Use, float]
    # share of the learned tokens that are of older weights
    older: float

    @property
    def parts(self) -> KeysView[str]:
        return self.mode.parts


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    outcomes: list[Outcome]
    # by the number of workers
    advice: dict[int, str]


def compare(job: Job, workers: Iterable[int]) -> Comparison:
    found = {count: _compare(replace(job, workers=count)) for count in workers}
    return Comparison(
        outcomes=[each for outcomes in found.values() for each in outcomes],
        advice={count: advise(outcomes) for count, outcomes in found.items()},
    )


def simulate(job: Job) -> tuple[World, Trained]:
    """Simulate until the last update, by the product's decisions."""
    world = job.world()
    scheduler = ProductScheduler(job, world)
    while scheduler.trained.steps < job.steps:
        scheduler.handle(world.next())
    for worker in world.workers:
        world.use(worker, "unused")
    return world, scheduler.trained


def advise(outcomes: Sequence[Outcome]) -> str:
    """Say in which order to add what pays, most of the gain first, and what doesn't pay."""
    words, best = _advise(outcomes)
    if best.mode.partial:
        single, _ = _advise([each for each in outcomes if not each.mode.partial])
        words += f". With answers of one version: {single}"
    if best.older > 0.0:
        strict, _ = _advise([each for each in outcomes if each.older == 0.0])
        words += f". By the newest weights alone: {strict}"
    return f"{best.workers} workers: {words}"


def _advise(outcomes: Sequence[Outcome]) -> tuple[str, Outcome]:
    best = min(outcomes, key=lambda each: each.seconds * LEAST_GAIN ** len(each.parts))
    gains, now = list[str](), outcomes[0]
    while now is not best:
        more = (each for each in outcomes if now.parts < each.parts <= best.parts)
        after = min(more, key=lambda each: (len(each.parts), each.seconds))
        (new,) = after.parts - now.parts
        gains.append(f"{new} ({now.seconds / after.seconds:.2f}x)")
        now = after
    words = [f"{', then '.join(gains)}; together {best.speed_up:.2f}x"] if gains else []
    known, addable = _parts(outcomes), _parts(each for each in outcomes if best.parts < each.parts)
    for parts, why in (
        (addable - best.parts, "less than 5 % more, which doesn't pay"),
        (known - addable - best.parts, "less than " + "".join(best.parts - {"speculation"})),
    ):
        words += [f"{', '.join(sorted(parts))}: {why}"] if parts else []
    return "; ".join(words), best


def _parts(outcomes: Iterable[Outcome]) -> set[str]:
    return {part for each in outcomes for part in each.parts}


def _compare(job: Job) -> list[Outcome]:
    """Return the best outcome of each mode, synchronous steps without speculation first."""
    groups = islice(job.groups(seed=1), _SAMPLE)
    tokens = sum(group.tokens for group in groups) / _SAMPLE
    step_tokens = tokens * job.spec.algorithm.prompts_per_step
    outcomes = [
        min(
            (_outcome(replace(job, mode=mode), step_tokens) for mode in sizes),
            key=lambda each: each.seconds,
        )
        for speculates in ((False, True) if job.inputs.drafts else (False,))
        for sizes in _modes(speculates)
    ]
    plain = outcomes[0].seconds
    return [replace(each, speed_up=plain / each.seconds) for each in outcomes]


def _modes(speculates: bool) -> Iterator[list[Mode]]:
    """Yield the sizes of each mode that are tried."""
    plain = Mode(speculates=speculates)
    yield [plain]
    yield [replace(plain, defer_long=surplus) for surplus in _SURPLUSES]
    yield [replace(plain, partial=surplus) for surplus in _SURPLUSES]
    yield [replace(plain, ahead=True)]


def _outcome(job: Job, step_tokens: float) -> Outcome:
    world, trained = simulate(job)
    # from all steps to one with answers of average length
    scale = step_tokens / trained.tokens
    seconds = scale * world.now
    return Outcome(
        mode=job.mode,
        workers=job.workers,
        seconds=seconds,
        device_seconds=seconds * job.workers * job.spec.rollout.tensor_parallel,
        uses={use: scale * spent for use, spent in world.seconds.items()},
        older=trained.older_tokens / trained.tokens,
    )
