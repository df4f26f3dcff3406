"""The duty of each worker as a report names it, and when it changes."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tlt.base.id_types import WorkerId
from tlt.policies.run.run_state import Duty, Phase, RunState, WorkerState
from tlt.report.transition import Transition

# lost, or not yet back
AWAY = "away"
# idle while other workers update the policy
WAITING_FOR_WEIGHTS = "waiting_for_weights"
# it decodes the next step's prompts
NEXT_STEP = "next_step"
# all answers wait for their environments
WAITING_FOR_TOOLS = "tools"
# stands for all workers where they are summed
ALL_WORKERS = WorkerId("all")


def duty_of(state: RunState, worker: WorkerState | None) -> str:
    if worker is None:
        return AWAY
    if worker.duty is Duty.IDLE and state.phase is Phase.POLICY_UPDATE:
        return WAITING_FOR_WEIGHTS
    if worker.decodes_ahead:
        return NEXT_STEP
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
