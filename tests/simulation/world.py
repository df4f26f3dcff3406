"""Simulate the surroundings of `coordinator.decide`: queue, fence, workers, reward, journal, blobs.

`moves` and `faults` list the possible next moves, and the caller chooses. There is no clock, thread
or I/O, so the same choices give the same history. As in the real store, the fence keeps a worker's
events between the start and the end of its incarnation; all else may be reordered and repeated.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from tests.simulation.checks import Checks
from tests.simulation.drafter_blobs import DrafterBlobs
from tests.simulation.drafter_training import DrafterTraining
from tests.simulation.incarnation import WorkerIncarnation
from tests.simulation.moves import Move
from tests.simulation.pauses import Pauses
from tests.simulation.policy_updates import PolicyUpdates
from tests.simulation.prompt_queue import PromptQueue
from tests.simulation.worker_events import JOB, reward
from tests.simulation.workers import Workers
from tlt.actors.coordinator.startup_event_backlog import lost_workers
from tlt.base.id_types import Epoch, Incarnation, JobStatus, WorkerId
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import Phase, RunState
from tlt.protocol.commands import (
    CommitBestPolicy,
    CommitDrafter,
    ContinueJob,
    DiscardBlobs,
    EndJob,
    IssuePrompts,
    PauseJob,
    ReleaseBlobs,
    RequeuePrompts,
    ResumeAnswers,
    RunCommand,
    StartJob,
    SuspendJob,
    ToWorker,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    RolloutCut,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    SessionResumed,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.refs import SCHEMA_VERSION, PolicyRef, StartingCheckpoint
from tlt.protocol.shared_values import Prepared, PromptSet
from tlt.spec.config import JobSpec
from tlt.store.journal import JournalEntry, digest

TRAIN_PROMPTS = 5
# of a mixture
TRAIN_SOURCES = (3, 2)
EVAL_SETS = (PromptSet(name="hard", prompts=1), PromptSet(name="easy", prompts=2))
WINDOW = 6
# seconds between two events
_SECONDS = 3.0

Decide = Callable[[RunState, RunEvent, float], tuple[RunState, list[RunCommand]]]
Reward = Callable[[JobSpec, RolloutFinished], float | None]

_writer = msgspec.json.Encoder()
_reader = msgspec.json.Decoder(JournalEntry)


class Posted(NamedTuple):
    """An entry of the events stream with the component that wrote it or that it is about."""

    source: str
    event: RunEvent


class World:
    def __init__(
        self,
        spec: JobSpec,
        ranks: Sequence[int],
        decide: Decide = coordinator.decide,
        speedup: float = 2.0,
        reward: Reward = reward,
        starts_from: StartingCheckpoint | None = None,
    ) -> None:
        self.spec = spec
        self.reward = reward
        self.decide = decide
        self.speedup = speedup
        self.state: RunState = coordinator.new_run(JOB, spec)
        self.drafter_blobs = DrafterBlobs(self)
        self.drafter_training = DrafterTraining(self, self.drafter_blobs)
        self.prompts = PromptQueue(self)
        self.workers = Workers(self)
        self.updates = PolicyUpdates(self)
        self.pauses = Pauses(self)
        self.checks = Checks(self)
        self.journal: list[bytes] = []
        self.log: list[Posted] = []
        self.delivered: list[RunEvent] = []
        self.unscored: list[RolloutFinished] = []
        self.flight: set[str] = set()
        blobs = () if starts_from is None else starts_from.blobs
        self.committed: set[str] = {blob.digest for blob in blobs}
        self.blobs_were_lost = False
        self.fence: dict[WorkerId, int] = {}
        self.ranks = {WorkerId(f"w{i}"): count for i, count in enumerate(ranks)}
        self.ranks_ever = dict(self.ranks)
        self.incarnations: dict[WorkerId, WorkerIncarnation] = {}
        self.starting: set[WorkerId] = set()
        # workers whose processes are dead, and whose lease may not have ended yet
        self.gone: set[WorkerId] = set()
        self.numbers: dict[WorkerId, Incarnation] = {}
        self.epoch = Epoch(1)
        self.status: JobStatus = "running"
        self.error: str | None = None
        self.incarnation_count = 0
        for worker in self.ranks:
            self.workers.start(worker, post=False)
        infos = tuple(self.workers.info(incarnation) for incarnation in self.incarnations.values())
        self.post(
            "coordinator",
            StartJob(
                folder="/runs",
                job=JOB,
                epoch=self.epoch,
                spec=spec,
                prepared=Prepared(
                    train_prompts=TRAIN_PROMPTS,
                    train_sources=TRAIN_SOURCES if spec.data.mixed else (),
                    eval_prompts=sum(each.prompts for each in EVAL_SETS),
                    eval_sets=EVAL_SETS,
                ),
                workers=infos,
                starts_from=starts_from,
            ),
        )
        self.deliver()

    @property
    def ended(self) -> bool:
        return self.state.phase is Phase.ENDED

    # --- moves and faults

    def moves(self) -> list[Move]:
        """Return the moves that may come next without faults."""
        found = [Move("deliver")] if self.log else []
        if self.unscored:
            found.append(Move("score"))
        for incarnation in self.incarnations.values():
            found += self.workers.moves(incarnation)
        found += [Move("start", (worker,)) for worker in sorted(self.starting)]
        found += [
            Move("update", (g,)) for g in self.updates.groups() if self.updates.is_complete(g)
        ]
        return found + self.pauses.moves()

    def faults(self) -> list[Move]:
        """Return the faults that may come next."""
        found = [Move("restart"), Move("reboot"), Move("reboot", (1,)), Move("lose_blobs")]
        for incarnation in self.incarnations.values():
            if incarnation.stopped:
                found += [
                    Move("continue_", (incarnation,)),
                    Move("end_lease", (incarnation.worker,)),
                ]
            else:
                found += [Move("stop", (incarnation,)), Move("crash", (incarnation,))]
            found.append(Move("kill", (incarnation,)))
            found += [Move(*fault) for fault in self.drafter_training.faults(incarnation)]
        found += [Move(*loss) for loss in self.drafter_blobs.losses()]
        for worker in sorted(self.gone):
            found += [Move("end_lease", (worker,)), Move("come_back", (worker,))]
        found += [Move("fail_to_start", (worker,)) for worker in sorted(self.starting)]
        if self.log:
            found.append(Move("repeat"))
        return found + self.pauses.faults()

    def do(self, move: Move) -> None:
        training = (self.drafter_blobs, self.drafter_training)
        parts = (*training, self.workers, self.updates, self.pauses, self)
        doer = next(part for part in parts if hasattr(part, move.kind))
        getattr(doer, move.kind)(*move.args)

    def repeat(self) -> None:
        """Repeat a transaction whose reply was lost."""
        self.log.append(self.log[-1])

    # --- events and commands

    def post(self, source: str, event: RunEvent) -> None:
        self.log.append(Posted(source, event))
        if isinstance(event, RolloutFinished):
            self.unscored.append(event)
            if event.purpose == "train":
                for incarnation in self.incarnations.values():
                    incarnation.known_answers.add((event.step, event.prompt, event.member))

    def deliverable(self) -> list[int]:
        """Return the entries that may be delivered next, at most WINDOW positions early."""
        candidates = range(min(WINDOW, len(self.log)))
        return [i for i in candidates if not any(self._in_order(j, i) for j in range(i))]

    def _in_order(self, earlier: int, later: int) -> bool:
        first, second = self.log[earlier], self.log[later]
        if isinstance(first.event, SessionResumed) or isinstance(second.event, SessionResumed):
            return True  # written before its coordinator reads any event
        ends = isinstance(first.event, WorkerJoined | WorkerLost) or isinstance(
            second.event, WorkerJoined | WorkerLost
        )
        return first.source == second.source and ends

    def deliver(self, index: int = 0) -> None:
        event = self.log.pop(index).event
        if not self.pauses.note(event):
            return
        before = self.state
        if before.phase is not Phase.ENDED:
            self.drafter_blobs.announce(event)
        now = _SECONDS * len(self.journal)
        after, commands = self.decide(before, event, now)
        self.state = after
        entry = JournalEntry(
            seq=len(self.journal),
            schema=SCHEMA_VERSION,
            at=now,
            event=event,
            commands=digest(commands),
        )
        self.journal.append(_writer.encode(entry))
        if not isinstance(event, PauseJob | ContinueJob):
            self.delivered.append(event)
        if isinstance(event, SessionResumed):
            self.blobs_were_lost = any(
                isinstance(p.event, SessionResumed) and not p.event.blobs_kept for p in self.log
            )
        self.checks.decided(before, event, after, commands)
        self.expect_nothing(event)
        for command in commands:
            self._execute(command)

    def expect_nothing(self, event: RunEvent) -> None:
        """Assert that the event changes nothing; unused blobs may be freed twice."""
        state, commands = self.decide(self.state, event, -1.0)
        assert state == self.state, f"{event} changes the state"
        for command in commands:
            assert isinstance(command, ReleaseBlobs | DiscardBlobs), f"{event} causes {command}"
            self.checks.check_released(command)

    def _execute(self, command: RunCommand) -> None:
        match command:
            case ToWorker():
                self._tell(command)
            case IssuePrompts():
                self.prompts.issue(command)
            case ResumeAnswers():
                self.prompts.resume(command)
            case RequeuePrompts():
                self.prompts.requeue(command)
            case ReleaseBlobs():
                self.flight -= {blob.digest for blob in command.blobs}
            case DiscardBlobs():
                self.flight -= {blob.digest for blob in command.blobs}
                self.committed -= {blob.digest for blob in command.blobs}
            case CommitBestPolicy():
                assert command.policy.weights is not None
                assert self.is_readable(command.policy) or self.blobs_were_lost
                self.committed |= {blob.digest for blob in command.policy.blobs}
            case CommitDrafter():
                self.drafter_blobs.commit(command.drafter)
            case SuspendJob():
                assert not self.state.workers
                self.pauses.suspended = True
            case EndJob():
                self.status, self.error = command.status, command.error
                self.prompts.clear()
            case _:
                pass  # has no effect in the simulation

    def _tell(self, command: WorkerCommand) -> None:
        if isinstance(command, UpdatePolicy):
            self.updates.expect(command)
        incarnation = self.incarnations.get(command.worker)
        if incarnation is not None and incarnation.number == command.incarnation:
            incarnation.commands.append(command)

    def is_readable(self, policy: PolicyRef) -> bool:
        return all(blob.digest in self.flight | self.committed for blob in policy.blobs)

    def score(self, index: int = 0) -> None:
        done = self.unscored.pop(index)
        scored = RolloutScored(
            job=JOB,
            epoch=done.epoch,
            step=done.step,
            attempt=done.attempt,
            purpose=done.purpose,
            prompt=done.prompt,
            member=done.member,
            length=done.length,
            reward=self.reward(self.spec, done),
        )
        self.post("reward", scored)

    # --- the coordinator

    def restart(self, *, blobs_kept: bool = True) -> None:
        """Rebuild the coordinator from its journal, and assert that it gives the same commands."""
        state = self.replay()
        assert state == self.state
        encoded = msgspec.msgpack.encode(state)
        self.state = msgspec.msgpack.decode(encoded, type=RunState)
        assert self.state == state
        self.epoch = Epoch(self.epoch + 1)
        self.post("coordinator", SessionResumed(epoch=self.epoch, blobs_kept=blobs_kept))

    def replay(self) -> RunState:
        state = coordinator.new_run(JOB, self.spec)
        for line in self.journal:
            entry = _reader.decode(line)
            state, commands = self.decide(state, entry.event, entry.at)
            assert digest(commands) == entry.commands, f"entry {entry.seq} gives other commands"
        return state

    def reboot(self, workers: int | None = None) -> None:
        """Restart the host, which ends all processes and the shared memory but not the store.

        The session comes up again with the first of its workers only.
        """
        self.incarnations.clear()
        self.pauses.joined.clear()
        self.gone.clear()
        self.starting = set(sorted(self.ranks)[:workers])
        # workers that joined are gone, and so is a coordinator that was starting
        decided = RolloutFinished | RolloutCut | WorkerJoined | SessionResumed
        rest = [posted for posted in self.log if not isinstance(posted.event, decided)]
        self.log = [p for p in self.log if isinstance(p.event, RolloutFinished | RolloutCut)]
        self.lose_blobs()
        known = {worker: known.info for worker, known in self.state.workers.items()}
        awaited = {w: self.state.newest_incarnations[w] for w in self.state.returning_workers}
        for lost in lost_workers(known, awaited, heartbeats={}):
            self.fence[lost.worker] = lost.incarnation + 1
            self.post("coordinator", lost)
        for _ in range(len(self.log)):
            self.deliver()
        self.log = [*rest, *self.log]

    def lose_blobs(self) -> None:
        self.flight.clear()
        self.blobs_were_lost = self.checks.lost_weights = True
        self.restart(blobs_kept=False)

    # --- the end of all faults

    def calm(self) -> None:
        """Continue stopped workers, let one dead worker come back, and end the others' leases."""
        for incarnation in list(self.incarnations.values()):
            incarnation.stopped = False
        if self.gone and not self.incarnations and not self.starting:
            self.workers.come_back(min(self.gone))
        for worker in sorted(self.gone):
            self.workers.end_lease(worker)

    def run_out(self, most: int) -> None:
        """Assert that without faults the job ends within `most` deliveries."""
        limit = len(self.journal) + most
        while not self.ended:
            moves = self.moves()
            assert moves, f"stuck: {self.summary()}"
            for move in moves:
                if move in self.moves():  # an earlier delivery may have ended its incarnation
                    self.do(move)
            assert len(self.journal) < limit, f"no end: {self.summary()}"

    def summary(self) -> str:
        state = self.state
        duties = {w: (k.duty.value, k.trainer_version) for w, k in state.workers.items()}
        unsettled = None if state.batch is None else state.batch.unsettled
        kinds = Counter(type(event).__name__ for event in self.delivered[-30:])
        policy, returning = state.policy, set(state.returning_workers)
        return (
            f"{state.phase}, step {state.step}, version {policy.version} of "
            f"{policy.target_version}, policy {policy.current.version}, attempt "
            f"{policy.update_attempt}, plans {list(policy.plans)}, workers {duties}, returning "
            f"{returning}, unsettled {unsettled}, pending {self.prompts.pending}, "
            f"lately {dict(kinds)}"
        )
