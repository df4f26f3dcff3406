"""Split the run's time: each worker's seconds by duty add up to the seconds of the step."""

from collections import defaultdict
from collections.abc import Iterator

from tlt.base.id_types import Step, WorkerId
from tlt.policies.run.run_state import Duty, RunState
from tlt.report.duties import ALL_WORKERS, AWAY, WAITING_FOR_TOOLS, duty_of, sum_by_duty

FIRST_STEP = Step(0)


class StepTime:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.device_seconds = 0.0
        self.workers: dict[WorkerId, defaultdict[str, float]] = {}

    def pass_time(self, state: RunState, passed: float) -> None:
        for worker in state.newest_incarnations:
            duties = self.workers.get(worker)
            if duties is None:
                duties = self.workers[worker] = defaultdict(float)
                if self.seconds > 0.0:  # it joined in the middle of the step
                    duties[AWAY] = self.seconds
            known = state.workers.get(worker)
            duties[duty_of(state, known)] += passed
            if known is not None:
                self.device_seconds += passed * known.info.ranks
        self.seconds += passed


class TimeByDuty:
    """Keep each step's seconds by worker, or with `by_worker=False` only those of the last step."""

    def __init__(self, by_worker: bool = True) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)
        self._by_worker = by_worker
        self._steps: dict[Step, StepTime] = {}
        self._current: StepTime | None = None
        # sums over the finished steps
        self._finished: defaultdict[WorkerId, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(float)
        )

    @property
    def device_seconds(self) -> float:
        return sum(step.device_seconds for step in self._steps.values())

    def pass_time(self, state: RunState, passed: float) -> None:
        self.phases[state.phase.value] += passed
        if state.step not in self._steps:
            self._finish_step()
            self._current = self._steps[state.step] = StepTime()
        self._steps[state.step].pass_time(state, passed)

    def wait_for_tools(self, worker: WorkerId, seconds: float) -> None:
        """Charge seconds of the current step's rollout to the wait for environments."""
        duties = None if self._current is None else self._current.workers.get(worker)
        if duties is not None:
            seconds = min(seconds, duties[Duty.ROLLOUT.value])
            duties[Duty.ROLLOUT.value] -= seconds
            duties[WAITING_FOR_TOOLS] += seconds

    def steps(self, since: Step = FIRST_STEP) -> Iterator[tuple[Step, StepTime]]:
        return ((step, time) for step, time in self._steps.items() if step >= since)

    def workers(self) -> dict[WorkerId, dict[str, float]]:
        """Return each worker's seconds by duty over all steps."""
        current = {} if self._current is None else self._current.workers
        return {
            worker: dict(sum_by_duty((self._finished[worker], current.get(worker, {}))))
            for worker in dict.fromkeys((*self._finished, *current))
        }

    def _finish_step(self) -> None:
        """Add the current step to the sums; a step never resumes after a later one has begun."""
        step = self._current
        if step is None:
            return
        for worker, duties in step.workers.items():
            self._finished[worker] = sum_by_duty((self._finished[worker], duties))
        if not self._by_worker:
            step.workers = {ALL_WORKERS: sum_by_duty(step.workers.values())}
