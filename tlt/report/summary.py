"""The summary of a run that is written to summary.json in its folder."""

import msgspec

from tlt.protocol.shared_values import HubPolicy
from tlt.report.drafter_training import DrafterTraining
from tlt.report.evaluation_figures import EvalSummary
from tlt.report.ledger_figure_types import Snapshot


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    job: str | None
    status: str
    error: str | None
    # the checkpoint of another job that this one started from, as JOB@STEP
    starts_from: str | None
    # the commit that it began with, of a policy of the Hub
    hub_policy: HubPolicy | None
    steps: int
    seconds: float
    phases: dict[str, float]
    # seconds of each worker by duty
    workers: dict[str, dict[str, float]]
    eval_before: float | None
    eval_before_stderr: float | None
    eval_after: float | None
    eval_after_stderr: float | None
    eval_problems: int
    # all evaluations, with the figures of each set
    evaluations: tuple[EvalSummary, ...]
    policy_version: int
    worker_losses: int
    device_seconds: float
    # by speculation on all ranks together, with the 95 % interval; None before an interval is known
    savings_seconds: float | None
    savings_low: float | None
    savings_high: float | None
    # rank seconds that the same rollouts would have taken without speculation
    plain_seconds: float | None
    # of what was lost: by decoding without speculation in control runs, and by being able to
    # speculate, which costs time in every decode step
    control_cost: float | None
    overhead: float | None
    # share of the generated tokens that updates trained on
    trained_share: float
    drafter_training: DrafterTraining | None


def summarise(snapshot: Snapshot) -> Summary:
    saved = snapshot.savings
    before = snapshot.evals[0] if snapshot.evals else None
    after = snapshot.evals[-1] if len(snapshot.evals) > 1 else None
    return Summary(
        job=snapshot.job,
        status=snapshot.status,
        error=snapshot.error,
        starts_from=snapshot.starts_from,
        hub_policy=snapshot.hub_policy,
        steps=len([step for step in snapshot.steps if step.update_seconds is not None]),
        seconds=snapshot.seconds,
        phases=snapshot.phases,
        workers={str(worker): duties for worker, duties in sorted(snapshot.workers.items())},
        eval_before=before.mean if before else None,
        eval_before_stderr=before.stderr if before else None,
        eval_after=after.mean if after else None,
        eval_after_stderr=after.stderr if after else None,
        eval_problems=before.problems if before else 0,
        evaluations=snapshot.evals,
        policy_version=snapshot.version,
        worker_losses=snapshot.losses,
        device_seconds=snapshot.device_seconds,
        savings_seconds=saved.total.seconds if saved else None,
        savings_low=saved.total.low if saved else None,
        savings_high=saved.total.high if saved else None,
        plain_seconds=saved.plain_seconds if saved else None,
        control_cost=saved.control_cost if saved else None,
        overhead=saved.overhead if saved else None,
        trained_share=snapshot.trained_share,
        drafter_training=snapshot.drafter_training,
    )
