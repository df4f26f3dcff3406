"""The duty of each worker as a report names it, when it changes, and what people read for it."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Duty, Phase, RunState, WorkerState
from tlt.report.transition import Transition

# lost, or not yet back
AWAY = "away"
# idle while other workers update the policy
WAITING = "waiting"
# stands for all workers where they are summed
ALL_WORKERS = WorkerId("all")
# What people read for the values, which journals and JSON keep; tlt/dashboard/static/names.js has
# the same texts.
DUTY_NAMES = {
    Duty.ROLLOUT.value: "rollout",
    Duty.DRAFTER_TRAINING.value: "drafter training",
    Duty.STOPPING.value: "stopping drafter training",
    Duty.POLICY_UPDATE.value: "policy update",
    WAITING: "waiting for weights",
    Duty.IDLE.value: "idle",
    Duty.LEAVING.value: "restarting ranks",
    AWAY: "away",
}
PHASE_NAMES = {
    Phase.STARTING.value: "starting",
    Phase.EVALUATING.value: "evaluating",
    Phase.ROLLOUT.value: "rollout",
    Phase.RESERVED_TRAINING.value: "reserved drafter training",
    Phase.POLICY_UPDATE.value: "policy update",
    Phase.PAUSED.value: "paused",
    Phase.ENDED.value: "ended",
}


def duty_of(state: RunState, worker: WorkerState | None) -> str:
    if worker is None:
        return AWAY
    if worker.duty is Duty.IDLE and state.phase is Phase.POLICY_UPDATE:
        return WAITING
    return worker.duty.value


def duty_changes(transition: Transition) -> Iterator[tuple[WorkerId, str]]:
    """Yield the workers whose duty may have changed, each with its duty now."""
    before, after = transition.before.workers, transition.after.workers
    if after is not before or transition.enters_phase:
        for worker, known in after.items():
            if before.get(worker) is not known or transition.enters_phase:
                yield worker, duty_of(transition.after, known)
        for worker in before:
            if worker not in after:
                yield worker, AWAY


def sum_by_duty(rows: Iterable[Mapping[str, float]]) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for duty, seconds in row.items():
            sums[duty] += seconds
    return sums
