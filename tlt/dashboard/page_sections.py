"""The sections of a run's page; a section that has not changed is not sent again."""

import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from tlt.base.id_types import WorkerId
from tlt.dashboard.rollout_tail import expected_answers
from tlt.dashboard.row_deltas import RowSection
from tlt.dashboard.run_fold import LossPoint, Run
from tlt.dashboard.step_times import StepTime
from tlt.dashboard.warnings_and_remedies import QUIET_SECONDS, Advice, advice_on_run, by_urgency
from tlt.policies.speculation.savings_estimate import Savings
from tlt.report import (
    Acceptance,
    Attempt,
    DrafterTraining,
    EvalSummary,
    Positions,
    Snapshot,
    StepSummary,
    StrategyRow,
    WorkerIncarnation,
)
from tlt.report.duties import ALL_WORKERS, sum_by_duty

NO_END = "no end"
_STEPS = 2000
_DECISIONS = 60
_EVALUATIONS = 500
_ATTEMPTS = 200
_DRAFTERS = 12
# the times of more workers are sent as one sum
_WORKERS = 64


class Head(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    # as in the journal; "no end" where the journal has no end and no session runs the job
    status: str
    # a session that is up runs the job
    followed: bool
    error: str | None
    # the checkpoint of another job that it started from, as JOB@STEP
    starts_from: str | None
    phase: str
    step: int
    steps: int
    version: int
    settled: int
    expected: int
    # from the first to the last entry
    seconds: float
    began: float | None
    # since the last entry of a run that has not ended
    quiet_seconds: float
    workers: int
    duties: dict[str, int]
    # None once the run is over
    tokens_per_second: float | None
    losses: int
    entries: int


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    gave_up: bool
    why: str
    strategies: tuple[StrategyRow, ...]
    acceptance: tuple[Acceptance, ...]
    positions: tuple[float, ...]
    # of the newest drafters, oldest first
    by_drafter: tuple[Positions, ...]
    savings: Savings | None


class Learning(RowSection, frozen=True, kw_only=True):
    prompts: int
    steps: tuple[StepSummary, ...]
    evals: tuple[EvalSummary, ...]
    trained_share: float
    # every held-out answer scored 0 or 1, so that their mean reward is an accuracy
    binary_rewards: bool


class Times(RowSection, frozen=True, kw_only=True):
    phases: dict[str, float]
    workers: dict[WorkerId, dict[str, float]]
    steps: tuple[StepTime, ...]


class Drafter(msgspec.Struct, frozen=True, kw_only=True):
    train: str
    account: DrafterTraining | None
    losses: tuple[LossPoint, ...]


class AttemptsView(msgspec.Struct, frozen=True, kw_only=True):
    attempts: tuple[Attempt, ...]
    incarnations: tuple[WorkerIncarnation, ...]


class Sections(msgspec.Struct, frozen=True, kw_only=True):
    speculation: Speculation
    learning: Learning
    times: Times
    drafter: Drafter
    attempts: AttemptsView
    advice: tuple[Advice, ...]


# sections that are sent row by row, and their lists of rows
ROW_LISTS = {"learning": ("steps", "evals"), "times": ("steps",)}


def head(run: Run, followed: bool) -> Head:
    state = run.ledger.state
    expected = expected_answers(state)
    duties = Counter(run.lanes.duties().values())
    live = is_live(run, followed)
    return Head(
        job=run.folder.name,
        status=NO_END if run.status == "running" and not live else run.status,
        followed=followed,
        error=run.error,
        starts_from=run.ledger.starts_from,
        phase=state.phase.value,
        step=state.step,
        steps=run.spec.algorithm.steps,
        version=state.policy.version,
        settled=0 if state.batch is None else expected - state.batch.unsettled,
        expected=expected,
        seconds=0.0 if run.began is None else round(run.last_entry - run.began, 2),
        began=run.began,
        quiet_seconds=round(quiet_seconds(run), 1),
        workers=sum(duties.values()),
        duties=dict(duties),
        tokens_per_second=round(run.token_rate.tokens_per_second(now(run, followed)), 1)
        if live
        else None,
        losses=state.losses,
        entries=run.position.entries,
    )


def quiet_seconds(run: Run) -> float:
    """Return the seconds since the last entry of a run that has not ended."""
    if run.began is None or run.ended or run.status == "paused":
        return 0.0
    return max(0.0, time.time() - run.last_entry)


def is_live(run: Run, followed: bool) -> bool:
    """Return True if the run goes on; a long silence counts only without a session that runs it."""
    if run.began is None or run.ended:
        return False
    if run.status == "paused":
        return followed
    return followed or quiet_seconds(run) <= QUIET_SECONDS


def now(run: Run, followed: bool) -> float:
    """Return the seconds since the run began; the time of a run that is over stands still."""
    if run.began is None:
        return 0.0
    live = is_live(run, followed)
    return (max(run.last_entry, time.time()) if live else run.last_entry) - run.began


def sections(run: Run, followed: bool) -> Sections:
    since = run.step_times.start_refresh(run.last_entry, run.ended)
    snapshot = run.ledger.snapshot(since=since)
    steps = run.step_times.replace(snapshot.accounts)
    prompts = run.spec.algorithm.prompts_per_step
    advice = advice_on_run(
        snapshot,
        prompts,
        run.errors.recent(now(run, followed)),
        0.0 if followed else quiet_seconds(run),
        run.failed_loggers(),
    )
    return Sections(
        speculation=Speculation(
            mode=run.ledger.spec.speculation.mode,
            gave_up=snapshot.gave_up,
            why=run.strategy_usage.why(),
            strategies=run.strategy_usage.table(),
            acceptance=snapshot.acceptance,
            positions=snapshot.positions,
            by_drafter=newest_drafters(snapshot.by_drafter),
            savings=snapshot.savings,
        ),
        learning=Learning(
            prompts=prompts,
            steps=snapshot.steps[-_STEPS:],
            evals=snapshot.evals[-_STEPS:],
            trained_share=snapshot.trained_share,
            binary_rewards=run.binary_rewards,
        ),
        times=_times(snapshot, steps[-_STEPS:]),
        drafter=Drafter(
            train=str(run.ledger.spec.drafter.train),
            account=None
            if snapshot.drafter_training is None
            else _newest_rows(snapshot.drafter_training),
            losses=tuple(run.losses),
        ),
        attempts=AttemptsView(
            attempts=tuple(run.attempts.attempts[-_ATTEMPTS:]),
            incarnations=run.attempts.incarnations(),
        ),
        advice=by_urgency(advice),
    )


def _times(snapshot: Snapshot, steps: Sequence[StepTime]) -> Times:
    workers = snapshot.workers
    return Times(
        phases=snapshot.phases,
        workers=dict(sorted(workers.items()))
        if len(workers) <= _WORKERS
        else {ALL_WORKERS: dict(sum_by_duty(workers.values()))},
        steps=tuple(steps),
    )


def newest_drafters(rows: Sequence[Positions]) -> tuple[Positions, ...]:
    """Return the row of n-grams, which never get old, and those of the newest drafters."""
    ngrams = [row for row in rows if row.drafter is None]
    drafters = [row for row in rows if row.drafter is not None]
    return (*ngrams, *drafters[-_DRAFTERS:])


def _newest_rows(account: DrafterTraining) -> DrafterTraining:
    return msgspec.structs.replace(
        account,
        evaluations=account.evaluations[-_EVALUATIONS:],
        decisions=account.decisions[-_DECISIONS:],
        refusals=account.refusals[-_DECISIONS:],
    )
