"""Where the time went: each worker's seconds by duty add up to those of the step."""

from collections import defaultdict
from collections.abc import Iterator

from tlt.policies.run_state import RunState
from tlt.types import Step, WorkerId

# heard of, and not there
AWAY = "away"


class StepTime:
    def __init__(self) -> None:
        self.seconds = 0.0
        self.device_seconds = 0.0
        self.workers: dict[WorkerId, defaultdict[str, float]] = {}

    def pass_time(self, state: RunState, passed: float) -> None:
        for worker in state.newest:
            duties = self.workers.get(worker)
            if duties is None:
                duties = self.workers[worker] = defaultdict(float)
                if self.seconds > 0.0:  # it came in the middle of the step
                    duties[AWAY] = self.seconds
            known = state.workers.get(worker)
            duties[AWAY if known is None else known.duty.value] += passed
            if known is not None:
                self.device_seconds += passed * known.info.ranks
        self.seconds += passed


class Wall:
    def __init__(self) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)
        self._steps: dict[Step, StepTime] = {}

    @property
    def device_seconds(self) -> float:
        return sum(step.device_seconds for step in self._steps.values())

    def pass_time(self, state: RunState, passed: float) -> None:
        self.phases[state.phase.value] += passed
        self._steps.setdefault(state.step, StepTime()).pass_time(state, passed)

    def steps(self) -> Iterator[tuple[Step, StepTime]]:
        return iter(sorted(self._steps.items()))

    def workers(self) -> dict[WorkerId, dict[str, float]]:
        """Over all steps."""
        sums: dict[WorkerId, defaultdict[str, float]] = {}
        for step in self._steps.values():
            for worker, duties in step.workers.items():
                into = sums.setdefault(worker, defaultdict(float))
                for duty, seconds in duties.items():
                    into[duty] += seconds
        return {worker: dict(duties) for worker, duties in sums.items()}
