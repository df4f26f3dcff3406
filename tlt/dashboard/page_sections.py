"""What the page is told of a run, in sections: one that has not changed is not told again."""

import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from tlt.dashboard.advice import QUIET_SECONDS, Advice, about_run, ordered
from tlt.dashboard.row_deltas import Growing
from tlt.dashboard.run_fold import Loss, Run
from tlt.dashboard.step_times import StepTime
from tlt.ids import WorkerId
from tlt.policies.speculation.savings_estimate import Savings
from tlt.report import (
    Acceptance,
    Attempt,
    Drafting,
    EvalSummary,
    Life,
    Positions,
    Snapshot,
    StepSummary,
    Way,
)
from tlt.report.time_by_duty import EVERYBODY, summed

NO_END = "no end"
_STEPS = 2000
_DECISIONS = 60
_MEASURED = 500
_ATTEMPTS = 200
_DRAFTERS = 12
# more are told as one
_WORKERS = 64


class Head(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    # as the journal says; "no end" where it has none, and nobody is at it
    status: str
    # a session is seen to be at it
    followed: bool
    error: str | None
    phase: str
    step: int
    steps: int
    version: int
    settled: int
    expected: int
    # since the first entry; while it runs, now is later than the last one
    seconds: float
    began: float | None
    quiet: float
    workers: int
    duties: dict[str, int]
    # None once nobody writes any more
    tokens_per_second: float | None
    losses: int
    entries: int


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    gave_up: bool
    why: str
    ways: tuple[Way, ...]
    acceptance: tuple[Acceptance, ...]
    positions: tuple[float, ...]
    # the newest drafters', the oldest of them first
    by_drafter: tuple[Positions, ...]
    saved: Savings | None


class Learning(Growing, frozen=True, kw_only=True):
    prompts: int
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    trained: float
    # every held-out answer so far, so that their mean reward is an accuracy
    right_or_wrong: bool


class Times(Growing, frozen=True, kw_only=True):
    phases: dict[str, float]
    workers: dict[WorkerId, dict[str, float]]
    steps: tuple[StepTime, ...]
    device_seconds: float


class Drafter(msgspec.Struct, frozen=True, kw_only=True):
    train: str
    account: Drafting | None
    losses: tuple[Loss, ...]


class AttemptsView(msgspec.Struct, frozen=True, kw_only=True):
    attempts: tuple[Attempt, ...]
    lives: tuple[Life, ...]


class Sections(msgspec.Struct, frozen=True, kw_only=True):
    speculation: Speculation
    learning: Learning
    times: Times
    drafter: Drafter
    attempts: AttemptsView
    advice: tuple[Advice, ...]


# sections that are told row by row, and their rows
GROWING = {"learning": ("steps", "evals"), "times": ("steps",)}


def head(run: Run, followed: bool) -> Head:
    state = run.ledger.state
    expected = unsettled = 0
    if state.batch is not None:
        expected = sum(len(group.members) for group in state.batch.groups.values())
        unsettled = state.batch.unsettled
    duties: defaultdict[str, int] = defaultdict(int)
    for duty in run.lanes.duties().values():
        duties[duty] += 1
    seconds = 0.0 if run.began is None else run.heard - run.began
    goes_on = is_live(run, followed)
    return Head(
        job=run.folder.name,
        status=run.status if goes_on or run.ended or run.began is None else NO_END,
        followed=followed,
        error=run.error,
        phase=state.phase.value,
        step=state.step,
        steps=run.spec.algorithm.steps,
        version=state.version,
        settled=expected - unsettled,
        expected=expected,
        seconds=round(seconds, 2),
        began=run.began,
        quiet=round(quiet_seconds(run), 1),
        workers=sum(duties.values()),
        duties=dict(duties),
        tokens_per_second=round(run.pace.tokens_per_second(now(run, followed)), 1)
        if goes_on
        else None,
        losses=state.losses,
        entries=run.position.entries,
    )


def quiet_seconds(run: Run) -> float:
    """Since the last entry of a run that goes on."""
    if run.began is None or run.ended:
        return 0.0
    return max(0.0, time.time() - run.heard)


def is_live(run: Run, followed: bool) -> bool:
    """Whether it goes on: silence means nothing where a session is seen to be at it."""
    if run.began is None or run.ended:
        return False
    return followed or quiet_seconds(run) <= QUIET_SECONDS


def now(run: Run, followed: bool) -> float:
    """In seconds since it began; that of its last entry where it goes on no more."""
    if run.began is None:
        return 0.0
    return (max(run.heard, time.time()) if is_live(run, followed) else run.heard) - run.began


def sections(run: Run, followed: bool) -> Sections:
    snapshot = run.ledger.snapshot(since=run.step_times.since(run.heard, run.ended))
    steps = run.step_times.learn(snapshot.accounts)
    prompts = run.spec.algorithm.prompts_per_step
    quiet = 0.0 if followed else quiet_seconds(run)
    lately = run.mishaps.lately(now(run, followed))
    advice = about_run(snapshot, prompts, lately, quiet, run.failed_loggers())
    return Sections(
        speculation=Speculation(
            mode=run.spec.speculation.mode,
            gave_up=snapshot.gave_up,
            why=run.ways.why(),
            ways=run.ways.table(),
            acceptance=snapshot.acceptance,
            positions=snapshot.positions,
            by_drafter=newest_drafters(snapshot.by_drafter),
            saved=snapshot.saved,
        ),
        learning=Learning(
            prompts=prompts,
            steps=snapshot.steps[-_STEPS:],
            evals=snapshot.evals[-_STEPS:],
            trained=snapshot.trained,
            right_or_wrong=run.right_or_wrong,
        ),
        times=_times(snapshot, steps[-_STEPS:]),
        drafter=Drafter(
            train=run.spec.drafter.train,
            account=None if snapshot.drafting is None else _newest(snapshot.drafting),
            losses=tuple(run.losses),
        ),
        attempts=AttemptsView(
            attempts=tuple(run.attempts.attempts[-_ATTEMPTS:]), lives=run.attempts.lives()
        ),
        advice=ordered(tuple(advice)),
    )


def _times(snapshot: Snapshot, steps: Sequence[StepTime]) -> Times:
    workers = snapshot.workers
    return Times(
        phases=snapshot.phases,
        workers=dict(sorted(workers.items()))
        if len(workers) <= _WORKERS
        else {EVERYBODY: dict(summed(workers.values()))},
        steps=tuple(steps),
        device_seconds=snapshot.device_seconds,
    )


def newest_drafters(found: Sequence[Positions]) -> tuple[Positions, ...]:
    """And the row of n-grams, which are never out of date."""
    ngrams = [row for row in found if row.drafter is None]
    drafters = [row for row in found if row.drafter is not None]
    return (*ngrams, *drafters[-_DRAFTERS:])


def _newest(drafting: Drafting) -> Drafting:
    return msgspec.structs.replace(
        drafting,
        measured=drafting.measured[-_MEASURED:],
        decisions=drafting.decisions[-_DECISIONS:],
        refused=drafting.refused[-_DECISIONS:],
    )
