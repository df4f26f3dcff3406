"""Simulate worker processes, which start, execute commands, report and die as real ones do."""

from typing import TYPE_CHECKING, assert_never

from tests.simulation.incarnation import WorkerIncarnation, meeting
from tests.simulation.moves import Move
from tests.simulation.worker_events import JOB, answer, cut, tallies
from tlt.base.id_types import Attempt, Incarnation, WorkerId
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    CutAnswers,
    MergeDrafter,
    OpenJob,
    PromptIssued,
    ReplaceRanks,
    StartRollout,
    StopDrafterTraining,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import DecodingReported, RunEvent, WorkerIdled, WorkerJoined, WorkerLost
from tlt.protocol.shared_values import WorkerInfo

if TYPE_CHECKING:
    from tests.simulation.world import World

_MOST_REPORTS = 6


class Workers:
    def __init__(self, world: "World") -> None:
        self.world = world

    def moves(self, incarnation: WorkerIncarnation) -> list[Move]:
        if incarnation.stopped:
            return []
        found = [Move("obey", (incarnation,))] if incarnation.commands else []
        if incarnation.number < self.world.fence[incarnation.worker]:
            found.append(Move("find_out", (incarnation,)))
        if incarnation.learning is not None:  # its ranks do nothing else during the update
            if incarnation.trained:
                found.append(Move("finish_update", (incarnation,)))
            elif self.world.updates.is_broken(meeting(incarnation.learning)):
                found.append(Move("crash", (incarnation,)))
            return found
        found += [Move(*move) for move in self.world.drafter_training.moves(incarnation)]
        found += [Move("finish", (incarnation, entry)) for entry in list(incarnation.held)[:2]]
        if incarnation.held and incarnation.reports < _MOST_REPORTS:
            found.append(Move("report_decoding", (incarnation,)))
        if (
            incarnation.assignment is not None
            and len(incarnation.held) < self.world.spec.rollout.slots * incarnation.ranks
        ):
            if self.world.prompts.queue_of(incarnation.assignment):
                found.append(Move("pull", (incarnation,)))
            elif not incarnation.held:
                found.append(Move("idle", (incarnation,)))
        return found

    def start(self, worker: WorkerId, *, post: bool = True) -> None:
        self.world.starting.discard(worker)
        incarnation = WorkerIncarnation(worker, self._number(worker), self.world.ranks[worker])
        self.world.incarnations[worker] = incarnation
        self.world.fence[worker] = incarnation.number
        if post:
            self.world.post(worker, WorkerJoined(info=self.info(incarnation)))

    def _number(self, worker: WorkerId) -> Incarnation:
        self.world.incarnation_count += 1
        self.world.numbers[worker] = Incarnation(self.world.incarnation_count)
        return self.world.numbers[worker]

    def info(self, incarnation: WorkerIncarnation) -> WorkerInfo:
        return WorkerInfo(
            worker=incarnation.worker,
            incarnation=incarnation.number,
            ranks=incarnation.ranks,
            host="host",
            rendezvous=f"host:{incarnation.number}",
        )

    def fail_to_start(self, worker: WorkerId) -> None:
        """End an incarnation that never joined, because its ranks don't start."""
        incarnation = self._number(worker)
        if incarnation >= self.world.fence.get(worker, 0):
            self.post_loss(worker, incarnation, returning=True)

    def post_loss(self, worker: WorkerId, incarnation: Incarnation, *, returning: bool) -> None:
        lost = WorkerLost(
            worker=worker, incarnation=incarnation, reason="test", returning=returning
        )
        self.world.post(worker, lost)

    def report(self, incarnation: WorkerIncarnation, *events: RunEvent) -> bool:
        """Post events in one transaction; the fence refuses it after the lease has ended."""
        if incarnation.number < self.world.fence[incarnation.worker]:
            for event in events:
                self._expect_no_ghost(incarnation, event)
            del self.world.incarnations[incarnation.worker]
            self.world.starting.add(incarnation.worker)
            return False
        for event in events:
            self.world.post(incarnation.worker, event)
        return True

    def _expect_no_ghost(self, incarnation: WorkerIncarnation, event: RunEvent) -> None:
        """Assert that an event of an old incarnation would change nothing without the fence."""
        state, worker = self.world.state, incarnation.worker
        if isinstance(event, WorkerLost) and incarnation.number > state.newest_incarnations.get(
            worker, -1
        ):
            return  # the run doesn't know of it yet, nor that its lease has ended
        known = state.workers.get(worker)
        if known is None or known.info.incarnation != incarnation.number:
            self.world.expect_nothing(event)

    def crash(self, incarnation: WorkerIncarnation) -> None:
        """Report the ranks lost, and start fresh ones."""
        lost = WorkerLost(
            worker=incarnation.worker,
            incarnation=incarnation.number,
            reason="crash",
            returning=True,
        )
        if self.report(incarnation, lost):
            del self.world.incarnations[incarnation.worker]
            self.world.starting.add(incarnation.worker)

    def kill(self, incarnation: WorkerIncarnation) -> None:
        """Kill the whole process without a report."""
        del self.world.incarnations[incarnation.worker]
        self.world.gone.add(incarnation.worker)

    def come_back(self, worker: WorkerId) -> None:
        self.world.gone.discard(worker)
        self.world.starting.add(worker)

    def stop(self, incarnation: WorkerIncarnation) -> None:
        incarnation.stopped = True

    def continue_(self, incarnation: WorkerIncarnation) -> None:
        incarnation.stopped = False

    def end_lease(self, worker: WorkerId) -> None:
        """Fence off a worker without heartbeats, then report it lost."""
        incarnation = self.world.numbers[worker]
        self.world.fence[worker] = max(self.world.fence.get(worker, 0), incarnation + 1)
        self.post_loss(worker, incarnation, returning=False)

    def find_out(self, incarnation: WorkerIncarnation) -> None:
        """Check the fence, as idle workers do."""
        self.report(incarnation)

    def obey(self, incarnation: WorkerIncarnation) -> None:
        command = incarnation.commands.popleft()
        match command:
            case OpenJob():
                pass
            case CloseJob():
                incarnation.assignment = None
                incarnation.held.clear()
                self.world.drafter_training.close(incarnation)
                if incarnation.learning is not None:
                    self.crash(incarnation)
            case TrainDrafter():
                self.world.drafter_training.start_session(incarnation, command)
            case StopDrafterTraining():
                self.world.drafter_training.stop_session(incarnation, command)
            case MergeDrafter():
                self.world.drafter_training.start_merge(incarnation, command)
            case AdoptDrafter():
                self.world.drafter_training.adopt(incarnation, command.drafter)
            case CutAnswers():
                self._cut(incarnation)
            case StartRollout():
                self._start_rollout(incarnation, command)
            case UpdatePolicy():
                self.world.updates.start(incarnation, command)
            case ReplaceRanks():
                self.crash(incarnation)
            case _:
                assert_never(command)

    def _start_rollout(self, incarnation: WorkerIncarnation, command: StartRollout) -> None:
        incarnation.speculates, incarnation.last_assignment = command.speculate, command
        if command.policy.version != incarnation.version:
            if not self.world.is_readable(command.policy):
                # a late command may name weights that were deleted
                self.world.checks.check_unreadable_weights(command)
                self.crash(incarnation)
                return
            incarnation.version = command.policy.version
        assert incarnation.training_session is None, "it trains"
        if command.drafter is not None:
            self.world.drafter_training.adopt(incarnation, command.drafter)
        if not incarnation.gone:
            incarnation.assignment = command

    def _cut(self, incarnation: WorkerIncarnation) -> None:
        """Report the answers to training prompts as cut, and take no more."""
        incarnation.assignment = None
        held = {e: prompt for e, prompt in incarnation.held.items() if prompt.purpose == "train"}
        if not self.report(incarnation, *(cut(incarnation, prompt) for prompt in held.values())):
            return
        for entry in held:
            del incarnation.held[entry]
            self.world.prompts.pending.get(incarnation.number, {}).pop(entry, None)

    def pull(self, incarnation: WorkerIncarnation) -> None:
        assert incarnation.assignment is not None
        entry, prompt = self.world.prompts.queue_of(incarnation.assignment).popleft()
        batch = incarnation.assignment.step, incarnation.assignment.purpose
        if self.world.spec.algorithm.staleness and (prompt.step, prompt.purpose) != batch:
            # of a batch that is over, or of other weights
            self.report(incarnation, cut(incarnation, prompt))
            return
        old = prompt.purpose == "train" and prompt.step < incarnation.assignment.step
        if old and self.world.spec.rollout.defer_long:
            return
        incarnation.held[entry] = prompt
        self.world.prompts.pending.setdefault(incarnation.number, {})[entry] = prompt

    def finish(self, incarnation: WorkerIncarnation, entry: int) -> None:
        answered = answer(incarnation, incarnation.held[entry])
        self.world.checks.check_version(answered, incarnation.version)
        if not self.report_decoding(incarnation, answered.length):
            return
        del incarnation.held[entry]
        if self.report(incarnation, answered):
            self.world.prompts.pending.get(incarnation.number, {}).pop(entry, None)

    def report_decoding(self, incarnation: WorkerIncarnation, tokens: int = 0) -> bool:
        """Report how the first rank has decoded these tokens; return False after its lease."""
        incarnation.reports += 1
        (held, *_) = incarnation.held.values()
        about: PromptIssued | StartRollout = held
        if self.world.spec.rollout.surplus(1) and incarnation.last_assignment is not None:
            about = incarnation.last_assignment  # what it holds may be of earlier steps
        chosen = DecodingReported(
            job=JOB,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            rank=0,
            serial=incarnation.reports,
            step=about.step,
            purpose=about.purpose,
            tallies=tallies(self.world.speedup, incarnation.reports, incarnation.drafter, tokens)
            if incarnation.speculates
            else (),
        )
        return self.report(incarnation, chosen)

    def idle(self, incarnation: WorkerIncarnation) -> None:
        assignment = incarnation.assignment
        assert assignment is not None
        incarnation.assignment = None
        idled = WorkerIdled(
            job=JOB,
            epoch=assignment.epoch,
            step=assignment.step,
            attempt=Attempt(0),
            worker=incarnation.worker,
            incarnation=incarnation.number,
            purpose=assignment.purpose,
            requeues=assignment.requeues,
        )
        self.report(incarnation, idled)
