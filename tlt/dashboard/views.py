"""What the page is told of a run, in sections: one that has not changed is not told again."""

import time
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from tlt.dashboard.advice import Advice, about_run, ordered
from tlt.dashboard.run import Loss, Run
from tlt.policies.ledger import (
    Acceptance,
    Attempt,
    Drafting,
    EvalSummary,
    Life,
    Snapshot,
    StepSummary,
    Way,
)
from tlt.policies.saved import Saved, Saving
from tlt.types import Step, WorkerId

_STEPS = 2000
_DECISIONS = 60
_MEASURED = 500
_ATTEMPTS = 200
# more are told as one
_WORKERS = 64


class Head(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    status: str
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
    tokens_per_second: float
    losses: int
    entries: int


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    seconds: float
    # of all workers, by duty
    duties: dict[str, float]
    saved: Saving | None
    critical: Saving | None


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    gave_up: bool
    why: str
    ways: tuple[Way, ...]
    acceptance: tuple[Acceptance, ...]
    positions: tuple[float, ...]
    saved: Saved | None


class Learning(msgspec.Struct, frozen=True, kw_only=True):
    prompts: int
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    trained: float


class Times(msgspec.Struct, frozen=True, kw_only=True):
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


def head(run: Run) -> Head:
    state = run.ledger.state
    expected = unsettled = 0
    if state.round is not None:
        expected = sum(len(group.members) for group in state.round.groups.values())
        unsettled = state.round.unsettled
    duties: defaultdict[str, int] = defaultdict(int)
    for duty in run.lanes.duties().values():
        duties[duty] += 1
    seconds = 0.0 if run.began is None else run.heard - run.began
    quiet = quiet_seconds(run)
    return Head(
        job=run.folder.name,
        status=run.status,
        error=run.error,
        phase=state.phase.value,
        step=state.step,
        steps=run.spec.algorithm.steps,
        version=state.version,
        settled=expected - unsettled,
        expected=expected,
        seconds=round(seconds, 2),
        began=run.began,
        quiet=round(quiet, 1),
        workers=len(duties) and sum(duties.values()),
        duties=dict(duties),
        tokens_per_second=round(run.pace.tokens_per_second(seconds), 1),
        losses=state.losses,
        entries=run.position.entries,
    )


def quiet_seconds(run: Run) -> float:
    """Since the last entry of a run that goes on."""
    if run.began is None or run.ended:
        return 0.0
    return max(0.0, time.time() - run.heard)


def sections(run: Run, followed: bool) -> Sections:
    """`followed`: a session is seen to be at it, so that silence means nothing."""
    snapshot = run.ledger.snapshot()
    prompts = run.spec.algorithm.prompts_per_step
    quiet = 0.0 if followed else quiet_seconds(run)
    advice = about_run(snapshot, prompts, run.refusals, quiet, run.failed_loggers())
    return Sections(
        speculation=Speculation(
            mode=run.spec.speculation.mode,
            gave_up=snapshot.gave_up,
            why=run.ways.why(),
            ways=run.ways.table(),
            acceptance=snapshot.acceptance,
            positions=snapshot.positions,
            saved=snapshot.saved,
        ),
        learning=Learning(
            prompts=prompts,
            steps=snapshot.steps[-_STEPS:],
            evals=snapshot.evals[-_STEPS:],
            trained=snapshot.trained,
        ),
        times=_times(snapshot),
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


def _times(snapshot: Snapshot) -> Times:
    workers = snapshot.workers
    return Times(
        phases=snapshot.phases,
        workers=dict(sorted(workers.items()))
        if len(workers) <= _WORKERS
        else {WorkerId("all"): _summed(workers)},
        steps=tuple(
            StepTime(
                step=account.step,
                seconds=account.seconds,
                duties=_summed(account.workers),
                saved=account.saved,
                critical=account.critical if account.rollout is not None else None,
            )
            for account in snapshot.accounts[-_STEPS:]
        ),
        device_seconds=snapshot.device_seconds,
    )


def _summed(workers: Mapping[WorkerId, Mapping[str, float]]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for spent in workers.values():
        for duty, seconds in spent.items():
            sums[duty] += seconds
    return dict(sums)


def _newest(drafting: Drafting) -> Drafting:
    return msgspec.structs.replace(
        drafting,
        measured=drafting.measured[-_MEASURED:],
        decisions=drafting.decisions[-_DECISIONS:],
    )
