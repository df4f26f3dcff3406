"""Compare cures for long answers, alone and together, on some numbers of workers.

Seconds are those of a step with answers of average length: a cure that puts long answers off must
not look faster for that.
"""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec.structs import replace

from tlt.simulation.cure_schedulers import INTAKES, Cures, CureScheduler
from tlt.simulation.product_scheduler import ProductScheduler
from tlt.simulation.scheduler import Job, Trained, run
from tlt.simulation.world import Use, World

# a cure pays that makes steps this many times as fast
LEAST_GAIN = 1.05
# shares that are tried: of groups beyond those needed, and of workers that only learn
_SURPLUSES, _LEARNERS = (0.25, 0.5, 1.0), (0.125, 0.25, 0.5)
# groups whose lengths are averaged
_SAMPLE = 4096


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a step in one mode."""

    # what is added to synchronous steps without speculation
    parts: tuple[str, ...]
    workers: int
    speculates: bool
    cures: Cures
    seconds: float
    device_seconds: float
    # against synchronous steps without speculation
    speed_up: float = 1.0
    # worker seconds by use
    uses: dict[Use, float]
    # share of the learned tokens that are of older weights
    older: float

    @property
    def name(self) -> str:
        return " + ".join(self.parts) or "synchronous"


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


def simulate(job: Job, cures: Cures | None = None) -> tuple[World, Trained]:
    """Simulate a job with cures; without any, by the product's own decisions."""
    world = job.world()
    product = cures is None
    scheduler = ProductScheduler(job, world) if product else CureScheduler(job, world, cures)
    run(world, scheduler)
    return world, scheduler.trained


def advise(outcomes: Sequence[Outcome]) -> str:
    """Say in which order to add what pays, most of the gain first, and what doesn't pay."""
    words, last = _find_order(outcomes)
    if last.older > 0.0:
        strict, _ = _find_order([each for each in outcomes if each.older == 0.0])
        words += f". By the newest weights alone: {strict}"
    return f"{last.workers} workers: {words}"


def _find_order(outcomes: Sequence[Outcome]) -> tuple[str, Outcome]:
    now, added = outcomes[0], list[str]()
    while True:
        more = [each for each in outcomes if len(each.parts) == len(now.parts) + 1]
        nexts = [each for each in more if set(each.parts) > set(now.parts)]
        best = min(nexts, key=lambda each: each.seconds, default=now)
        if now.seconds / best.seconds < LEAST_GAIN:
            break
        (new,) = set(best.parts) - set(now.parts)
        added.append(f"{new} ({now.seconds / best.seconds:.2f}x)")
        now = best
    words = [f"{', then '.join(added)}; together {now.speed_up:.2f}x"] if added else []
    rest = sorted({part for each in outcomes for part in each.parts} - set(now.parts))
    words += [f"{', '.join(rest)}: less than 5 % more, which doesn't pay"] if rest else []
    return "; ".join(words), now


def _compare(job: Job) -> list[Outcome]:
    outcomes = [
        outcome
        for speculates in ((False, True) if job.inputs.drafts else (False,))
        for outcome in _Search(replace(job, speculates=speculates)).outcomes()
    ]
    plain = outcomes[0].seconds
    return [replace(each, speed_up=plain / each.seconds) for each in outcomes]


class _Search:
    """Tries the sizes of each cure alone, and the best ones in combinations."""

    def __init__(self, job: Job) -> None:
        self._job = job
        tokens = sum(group.tokens for group in job.groups(seed=1).draw(_SAMPLE))
        self._step_tokens = tokens / _SAMPLE * job.spec.algorithm.prompts_per_step

    def outcomes(self) -> list[Outcome]:
        """Return the best outcome of each combination, synchronous steps first."""
        workers = self._job.workers
        counts = {max(1, round(share * workers)) for share in _LEARNERS if workers > 1}
        overlaps = [Cures(), Cures(ahead=True)]
        overlaps += self._best([Cures(ahead=True, learners=count) for count in sorted(counts)])
        intakes = [Cures()]
        for intake in list(INTAKES)[1:]:
            intakes += self._best([Cures(intake=intake, surplus=each) for each in _SURPLUSES])
        return [
            self._outcome(replace(overlap, intake=intake.intake, surplus=intake.surplus))
            for intake in intakes
            for overlap in overlaps
        ]

    def _best(self, tried: Sequence[Cures]) -> list[Cures]:
        outcomes = [self._outcome(each) for each in tried]
        return [min(outcomes, key=lambda each: each.seconds).cures] if outcomes else []

    def _outcome(self, cures: Cures) -> Outcome:
        job = self._job
        world, trained = simulate(job, None if cures == Cures() else cures)
        # from all steps to one with answers of average length
        scale = self._step_tokens / trained.tokens
        devices = job.workers * job.spec.rollout.tensor_parallel
        return Outcome(
            parts=_parts(job.speculates, cures),
            workers=job.workers,
            speculates=job.speculates,
            cures=cures,
            seconds=scale * world.now,
            device_seconds=scale * world.now * devices,
            uses={use: scale * seconds for use, seconds in world.seconds.items()},
            older=trained.older_tokens / trained.tokens,
        )


def _parts(speculates: bool, cures: Cures) -> tuple[str, ...]:
    overlap = "two batches with learners" if cures.learners else "two batches"
    parts = ("speculation" * speculates, INTAKES[cures.intake].label, overlap * cures.ahead)
    return tuple(filter(None, parts))
