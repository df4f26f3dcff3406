"""Where the time went: each worker's seconds by duty add up to those of the step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from tlt.ids import Step, WorkerId
from tlt.policies.job.run_state import Duty, Phase, RunState, WorkerState

# heard of, and not there
AWAY = "away"
# through with its part of an update, or just there: others still learn
WAITING = "waiting"
EVERYBODY = WorkerId("all")
FIRST = Step(0)


def duty_of(state: RunState, worker: WorkerState | None) -> str:
    if worker is None:
        return AWAY
    if worker.duty is Duty.IDLE and state.phase is Phase.POLICY_UPDATE:
        return WAITING
    return worker.duty.value


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
                if self.seconds > 0.0:  # it came in the middle of the step
                    duties[AWAY] = self.seconds
            known = state.workers.get(worker)
            duties[duty_of(state, known)] += passed
            if known is not None:
                self.device_seconds += passed * known.info.ranks
        self.seconds += passed

    def forget_workers(self) -> None:
        """All as one, once no more time passes in this step."""
        self.workers = {EVERYBODY: summed(self.workers.values())}


class Wall:
    """`by_worker`: whether each step's seconds are kept for each of its workers."""

    def __init__(self, by_worker: bool = True) -> None:
        self.phases: defaultdict[str, float] = defaultdict(float)
        self._by_worker = by_worker
        self._steps: dict[Step, StepTime] = {}
        self._now: StepTime | None = None
        # of the steps that are over
        self._over: defaultdict[WorkerId, defaultdict[str, float]] = defaultdict(_zeros)

    @property
    def device_seconds(self) -> float:
        return sum(step.device_seconds for step in self._steps.values())

    def pass_time(self, state: RunState, passed: float) -> None:
        self.phases[state.phase.value] += passed
        if state.step not in self._steps:
            self._close_step()
            self._now = self._steps[state.step] = StepTime()
        self._steps[state.step].pass_time(state, passed)

    def steps(self, since: Step = FIRST) -> Iterator[tuple[Step, StepTime]]:
        return ((step, time) for step, time in self._steps.items() if step >= since)

    def workers(self) -> dict[WorkerId, dict[str, float]]:
        """Over all steps."""
        now = {} if self._now is None else self._now.workers
        return {
            worker: dict(summed((self._over[worker], now.get(worker, {}))))
            for worker in dict.fromkeys((*self._over, *now))
        }

    def _close_step(self) -> None:
        """Steps are taken one after the other, and none is gone back to."""
        if self._now is None:
            return
        for worker, duties in self._now.workers.items():
            self._over[worker] = summed((self._over[worker], duties))
        if not self._by_worker:
            self._now.forget_workers()


def summed(some: Iterable[Mapping[str, float]]) -> defaultdict[str, float]:
    sums = _zeros()
    for spent in some:
        for duty, seconds in spent.items():
            sums[duty] += seconds
    return sums


def _zeros() -> defaultdict[str, float]:
    return defaultdict(float)
