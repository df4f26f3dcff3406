"""Everything around `coordinator.decide`, in memory: queue, fence, workers, reward, journal, blobs.

Nothing in here chooses: `moves` and `faults` say what could happen next, the caller picks. There is
no clock, no thread and no I/O, so the same choices give the same history.

As in the real store, what one worker reports keeps its order relative to the beginning and the end
of its incarnation (the fence sees to that); everything else may be overtaken and repeated.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, assert_never

import msgspec

from tests.simulation.checks import Checks
from tests.simulation.drafter_training import School
from tests.simulation.incarnation import WorkerIncarnation, blob, meeting
from tlt.actors.recovery import lost_workers
from tlt.config import JobSpec
from tlt.ids import (
    NAMED,
    Attempt,
    Epoch,
    Incarnation,
    JobId,
    JobStatus,
    Member,
    PolicyVersion,
    PromptIndex,
    WorkerId,
)
from tlt.policies import coordinator
from tlt.policies.job.run_state import Phase, RunState
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import (
    AdoptDrafter,
    CloseJob,
    CommitBestPolicy,
    CommitDrafter,
    DiscardBlobs,
    FinishRun,
    ForgetRollouts,
    IssuePrompts,
    KeepRollout,
    MergeDrafter,
    OpenJob,
    PromptIssued,
    ReleaseBlobs,
    ReplaceRanks,
    RequeuePrompts,
    RunCommand,
    StartRollout,
    StopDrafterTraining,
    StopSpeculation,
    ToWorker,
    TrainDrafter,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import (
    AnyEvent,
    CheckpointCommitted,
    DecodingReported,
    JobStarted,
    PolicyPublished,
    PolicyUpdateFinished,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    SessionResumed,
    WorkerIdled,
    WorkerJoined,
    WorkerLost,
)
from tlt.protocol.records import ControlRuns, StrategyTally, WorkerInfo
from tlt.protocol.refs import (
    SCHEMA_VERSION,
    Checkpoint,
    DrafterRef,
    MinibatchShare,
    PolicyRef,
    Tensor,
)
from tlt.store.journal import JournalEntry, digest
from tlt.strategies import Draft, Off

JOB = JobId("job")
TRAIN_PROMPTS = 5
EVAL_PROMPTS = 2
WINDOW = 6
_MOST_TALLIES = 6
# between two events
_SECONDS = 3.0

Decide = Callable[[RunState, RunEvent, float], tuple[RunState, list[RunCommand]]]

_writer = msgspec.json.Encoder()
_reader = msgspec.json.Decoder(JournalEntry)


class Posted(NamedTuple):
    """An entry of the events stream and who wrote it (or whom it is about)."""

    source: str
    event: RunEvent


class Move(NamedTuple):
    """A method of the world and what to call it with."""

    kind: str
    args: tuple[Any, ...] = ()


class World:
    def __init__(
        self,
        spec: JobSpec,
        ranks: Sequence[int],
        decide: Decide = coordinator.decide,
        speedup: float = 2.0,
    ) -> None:
        self.spec = spec
        self.decide = decide
        # of speculation, whatever it is that the workers decode
        self.speedup = speedup
        self.state: RunState = coordinator.new_run(JOB, spec)
        self.school = School(self)
        self.checks = Checks(self)
        self.journal: list[bytes] = []
        self.log: list[Posted] = []
        self.delivered: list[RunEvent] = []
        self.unscored: list[RolloutFinished] = []
        self.queue: deque[tuple[int, PromptIssued]] = deque()
        self.pending: dict[Incarnation, dict[int, PromptIssued]] = {}
        self.kept: dict[int, dict[tuple[int, int], RolloutFinished]] = {}
        self.flight: set[str] = set()
        self.committed: set[str] = set()
        # the coordinator may not have heard of it yet
        self.blobs_were_lost = False
        self.fence: dict[WorkerId, int] = {}
        self.ranks = {WorkerId(f"w{i}"): count for i, count in enumerate(ranks)}
        self.lives: dict[WorkerId, WorkerIncarnation] = {}
        # processes that are there, and about to start a life
        self.starting: set[WorkerId] = set()
        # processes that are not there, and whose lease may yet have to end
        self.gone: set[WorkerId] = set()
        self.learners: dict[str, frozenset[Incarnation]] = {}
        self.numbers: dict[WorkerId, Incarnation] = {}
        self.epoch = Epoch(1)
        self.status: JobStatus = "running"
        self._incarnations = 0
        self._entries = 0
        for worker in self.ranks:
            self.start(worker, post=False)
        infos = tuple(self._info(life) for life in self.lives.values())
        self.post(
            "coordinator",
            JobStarted(
                folder="/runs",
                job=JOB,
                epoch=self.epoch,
                spec=spec,
                train_prompts=TRAIN_PROMPTS,
                eval_prompts=EVAL_PROMPTS,
                workers=infos,
            ),
        )
        self.deliver()

    @property
    def ended(self) -> bool:
        return self.state.phase is Phase.ENDED

    # --- what can happen

    def moves(self) -> list[Move]:
        """What happens by itself when nothing goes wrong."""
        found = [Move("deliver")] if self.log else []
        if self.unscored:
            found.append(Move("score"))
        for life in self.lives.values():
            found += self._moves_of(life)
        found += [Move("start", (worker,)) for worker in sorted(self.starting)]
        found += [Move("collect", (g,)) for g in self._groups() if self._is_complete(g)]
        return found

    def _moves_of(self, life: WorkerIncarnation) -> list[Move]:
        if life.stopped:
            return []
        found = [Move("obey", (life,))] if life.commands else []
        if life.incarnation < self.fence[life.worker]:
            found.append(Move("find_out", (life,)))
        if life.learning is not None:  # its ranks do nothing else meanwhile
            if life.trained:
                found.append(Move("report", (life,)))
            elif self._is_broken(meeting(life.learning)):
                found.append(Move("crash", (life,)))
            return found
        found += [Move(*move) for move in self.school.moves(life)]
        found += [Move("finish", (life, entry)) for entry in list(life.held)[:2]]
        if life.held and life.told < _MOST_TALLIES:
            found.append(Move("tell", (life,)))
        if life.assignment is not None and len(life.held) < self.spec.rollout.slots * life.ranks:
            if self.queue:
                found.append(Move("pull", (life,)))
            elif not life.held:
                found.append(Move("idle", (life,)))
        return found

    def faults(self) -> list[Move]:
        """What goes wrong."""
        found = [Move("restart"), Move("reboot"), Move("reboot", (1,)), Move("lose_blobs")]
        for life in self.lives.values():
            if life.stopped:
                found += [Move("wake", (life,)), Move("observe", (life.worker,))]
            else:
                found += [Move("stop", (life,)), Move("crash", (life,))]
            found.append(Move("kill", (life,)))
            found += [Move(*fault) for fault in self.school.faults(life)]
        found += [Move(*loss) for loss in self.school.losses()]
        for worker in sorted(self.gone):
            found += [Move("observe", (worker,)), Move("come_back", (worker,))]
        found += [Move("fail_to_start", (worker,)) for worker in sorted(self.starting)]
        if self.log:
            found.append(Move("repeat"))
        return found

    def do(self, move: Move) -> None:
        doer = self.school if hasattr(self.school, move.kind) else self
        getattr(doer, move.kind)(*move.args)

    def repeat(self) -> None:
        """A transaction whose reply was lost is said again."""
        self.log.append(self.log[-1])

    # --- events and commands

    def post(self, source: str, event: RunEvent) -> None:
        self.log.append(Posted(source, event))
        if isinstance(event, RolloutFinished):
            self.unscored.append(event)
            if event.purpose == "train":
                for life in self.lives.values():
                    life.overheard.add((event.step, event.prompt, event.member))

    def deliverable(self) -> list[int]:
        """Which entries may come next, none more than WINDOW places too early."""
        candidates = range(min(WINDOW, len(self.log)))
        return [i for i in candidates if not any(self._in_order(j, i) for j in range(i))]

    def _in_order(self, earlier: int, later: int) -> bool:
        first, second = self.log[earlier], self.log[later]
        if isinstance(first.event, SessionResumed) or isinstance(second.event, SessionResumed):
            return True  # written before its coordinator reads anything
        ends = isinstance(first.event, WorkerJoined | WorkerLost) or isinstance(
            second.event, WorkerJoined | WorkerLost
        )
        return first.source == second.source and ends

    def deliver(self, index: int = 0) -> None:
        event = self.log.pop(index).event
        before = self.state
        if before.phase is not Phase.ENDED:
            self.school.heard(event)
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
        self.delivered.append(event)
        if isinstance(event, SessionResumed):
            self.blobs_were_lost = any(
                isinstance(p.event, SessionResumed) and not p.event.blobs_kept for p in self.log
            )
        self.checks.decided(before, event, after, commands)
        self.expect_nothing(event)
        for command in commands:
            self._execute(command, event)

    def expect_nothing(self, event: RunEvent) -> None:
        """Delivering this now changes nothing; what is unused may be let go of twice."""
        state, commands = self.decide(self.state, event, -1.0)
        assert state == self.state, f"{event} changes the state"
        for command in commands:
            assert isinstance(command, ReleaseBlobs | DiscardBlobs), f"{event} causes {command}"
            self.checks.lets_go(command)

    def _execute(self, command: RunCommand, event: AnyEvent) -> None:
        match command:
            case ToWorker():
                self._tell(command)
            case IssuePrompts():
                self._issue(command)
            case RequeuePrompts():
                self._requeue(command)
            case KeepRollout():
                assert isinstance(event, RolloutFinished)
                answers = self.kept.setdefault(command.step, {})
                assert (command.prompt, command.member) not in answers
                answers[command.prompt, command.member] = event
            case ForgetRollouts():
                for step in command.steps:
                    self.kept.pop(step, None)
            case ReleaseBlobs():
                self.flight -= {blob.digest for blob in command.blobs}
            case DiscardBlobs():
                self.flight -= {blob.digest for blob in command.blobs}
                self.committed -= {blob.digest for blob in command.blobs}
            case CommitBestPolicy():
                assert command.policy.weights is not None
                assert self.is_readable(command.policy) or self.blobs_were_lost
                self.committed.add(command.policy.weights.digest)
            case CommitDrafter():
                self.school.kept(command.drafter)
            case FinishRun():
                self.status = command.status
                self.queue.clear()
                self.pending.clear()
            case _:
                pass  # it has no effect on what is simulated

    def _tell(self, command: WorkerCommand) -> None:
        if isinstance(command, UpdatePolicy):
            known = self.learners.get(meeting(command), frozenset())
            self.learners[meeting(command)] = known | {command.incarnation}
        life = self.lives.get(command.worker)
        if life is not None and life.incarnation == command.incarnation:
            life.commands.append(command)

    def _issue(self, command: IssuePrompts) -> None:
        for prompt in command.prompts:
            for member in range(command.members):
                self._enqueue(
                    PromptIssued(
                        job=JOB,
                        epoch=command.epoch,
                        step=command.step,
                        attempt=Attempt(0),
                        purpose=command.purpose,
                        prompt=prompt,
                        member=Member(member),
                        tokens=(1,),
                    )
                )

    def _enqueue(self, prompt: PromptIssued) -> None:
        self._entries += 1
        self.queue.append((self._entries, prompt))

    def _requeue(self, command: RequeuePrompts) -> None:
        for held in self.pending.pop(command.incarnation, {}).values():
            again = msgspec.structs.replace(held, attempt=Attempt(held.attempt + 1))
            if again.attempt < self.spec.rollout.max_tries:
                self._enqueue(again)
                continue
            dropped = RolloutDropped(
                job=JOB,
                epoch=held.epoch,
                step=held.step,
                attempt=held.attempt,
                purpose=held.purpose,
                prompt=held.prompt,
                member=held.member,
                reason="lost too often",
            )
            self.post("requeue", dropped)

    def is_readable(self, policy: PolicyRef) -> bool:
        weights = policy.weights
        return weights is None or weights.digest in self.flight | self.committed

    # --- workers

    def start(self, worker: WorkerId, *, post: bool = True) -> None:
        self.starting.discard(worker)
        life = WorkerIncarnation(worker, self._number(worker), self.ranks[worker])
        self.lives[worker] = life
        self.fence[worker] = life.incarnation
        if post:
            self.post(worker, WorkerJoined(info=self._info(life)))

    def _number(self, worker: WorkerId) -> Incarnation:
        self._incarnations += 1
        self.numbers[worker] = Incarnation(self._incarnations)
        return self.numbers[worker]

    def _info(self, life: WorkerIncarnation) -> WorkerInfo:
        return WorkerInfo(
            worker=life.worker,
            incarnation=life.incarnation,
            ranks=life.ranks,
            host="host",
            rendezvous=f"host:{life.incarnation}",
        )

    def fail_to_start(self, worker: WorkerId) -> None:
        """Its ranks do not come up: an incarnation ends that never joined."""
        incarnation = self._number(worker)
        if incarnation >= self.fence.get(worker, 0):
            self._post_lost(worker, incarnation, returning=True)

    def _post_lost(self, worker: WorkerId, incarnation: Incarnation, *, returning: bool) -> None:
        lost = WorkerLost(
            worker=worker, incarnation=incarnation, reason="test", returning=returning
        )
        self.post(worker, lost)

    def _report(self, life: WorkerIncarnation, *events: RunEvent) -> bool:
        """One transaction; where the lease has ended it is refused, and the life is over."""
        if life.incarnation < self.fence[life.worker]:
            for event in events:
                self._expect_no_ghost(life, event)
            del self.lives[life.worker]
            self.starting.add(life.worker)
            return False
        for event in events:
            self.post(life.worker, event)
        return True

    def say(self, life: WorkerIncarnation, *events: RunEvent) -> bool:
        return self._report(life, *events)

    def _expect_no_ghost(self, life: WorkerIncarnation, event: RunEvent) -> None:
        """Had it got past the fence: from an incarnation that is over it counts for nothing."""
        known = self.state.workers.get(life.worker)
        if known is None or known.info.incarnation != life.incarnation:
            self.expect_nothing(event)

    def crash(self, life: WorkerIncarnation) -> None:
        """The ranks are void; the worker says so and starts fresh ones."""
        lost = WorkerLost(
            worker=life.worker, incarnation=life.incarnation, reason="crash", returning=True
        )
        if self._report(life, lost):
            del self.lives[life.worker]
            self.starting.add(life.worker)

    def kill(self, life: WorkerIncarnation) -> None:
        """The whole process is gone and says nothing."""
        del self.lives[life.worker]
        self.gone.add(life.worker)

    def come_back(self, worker: WorkerId) -> None:
        self.gone.discard(worker)
        self.starting.add(worker)

    def stop(self, life: WorkerIncarnation) -> None:
        life.stopped = True

    def wake(self, life: WorkerIncarnation) -> None:
        life.stopped = False

    def observe(self, worker: WorkerId) -> None:
        """No heartbeat for too long: shut out first, then say so."""
        incarnation = self.numbers[worker]
        self.fence[worker] = max(self.fence.get(worker, 0), incarnation + 1)
        self._post_lost(worker, incarnation, returning=False)

    def find_out(self, life: WorkerIncarnation) -> None:
        """Whoever has nothing to report looks at the fence now and then."""
        self._report(life)

    def obey(self, life: WorkerIncarnation) -> None:
        command = life.commands.popleft()
        match command:
            case OpenJob():
                pass
            case CloseJob():
                life.assignment = None
                life.held.clear()
                self.school.close(life)
                if life.learning is not None:
                    self.crash(life)
            case TrainDrafter():
                self.school.train(life, command)
            case StopDrafterTraining():
                self.school.preempt(life, command)
            case MergeDrafter():
                self.school.ask(life, command)
            case AdoptDrafter():
                self.school.adopt(life, command.drafter)
            case StartRollout():
                self._start_rollout(life, command)
            case StopSpeculation():
                life.speculates = False
            case UpdatePolicy():
                self._start_learning(life, command)
            case ReplaceRanks():
                self.crash(life)
            case _:
                assert_never(command)

    def _start_rollout(self, life: WorkerIncarnation, command: StartRollout) -> None:
        if command.policy.version != life.version and command.policy.weights is not None:
            if not self.is_readable(command.policy):
                # it may be late; nobody is told to read what is gone now
                self.checks.unreadable(command)
                self.crash(life)
                return
            life.version = command.policy.version
        assert life.training_session is None, "it trains"
        if command.drafter is not None:
            self.school.adopt(life, command.drafter)
        if not life.gone:
            life.assignment = command

    def _start_learning(self, life: WorkerIncarnation, command: UpdatePolicy) -> None:
        assert life.training_session is None, "it trains"
        life.assignment = None
        life.learning, life.trained = command, False
        answers = self.kept.get(command.step, {})
        wanted = [ref for share in command.minibatches for rank in share.ranks for ref in rank]
        if any((ref.prompt, ref.member) not in answers for ref in wanted):
            self.checks.samples_gone(command)
            self.crash(life)

    def pull(self, life: WorkerIncarnation) -> None:
        entry, prompt = self.queue.popleft()
        life.held[entry] = prompt
        self.pending.setdefault(life.incarnation, {})[entry] = prompt

    def finish(self, life: WorkerIncarnation, entry: int) -> None:
        prompt = life.held.pop(entry)
        if self._report(life, answer(life, prompt)):
            self.pending.get(life.incarnation, {}).pop(entry, None)

    def tell(self, life: WorkerIncarnation) -> None:
        """How its first rank decoded lately."""
        life.told += 1
        (held, *_) = life.held.values()
        chosen = DecodingReported(
            job=JOB,
            worker=life.worker,
            incarnation=life.incarnation,
            rank=0,
            serial=life.told,
            step=held.step,
            purpose=held.purpose,
            tallies=tallies(self.speedup, life.told, life.drafter) if life.speculates else (),
        )
        self._report(life, chosen)

    def idle(self, life: WorkerIncarnation) -> None:
        assignment = life.assignment
        assert assignment is not None
        life.assignment = None
        idled = WorkerIdled(
            job=JOB,
            epoch=assignment.epoch,
            step=assignment.step,
            attempt=Attempt(0),
            worker=life.worker,
            incarnation=life.incarnation,
            purpose=assignment.purpose,
            requeues=assignment.requeues,
        )
        self._report(life, idled)

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
            reward=reward(self.spec, done),
        )
        self.post("reward", scored)

    # --- the collective

    def _groups(self) -> list[str]:
        learning = (life.learning for life in self.lives.values())
        return sorted({meeting(learn) for learn in learning if learn is not None})

    def _members(self, group: str) -> list[WorkerIncarnation]:
        """Those in it now; ranks that are stopped or gone keep the others waiting."""
        return [
            life
            for life in self.lives.values()
            if not life.stopped and life.learning is not None and meeting(life.learning) == group
        ]

    def _is_complete(self, group: str) -> bool:
        members = self._members(group)
        fresh = [life for life in members if not life.trained]
        return len(fresh) == len(self.learners[group]) and len(fresh) > 0

    def _is_broken(self, group: str) -> bool:
        """Some member will never be in it again."""
        alive = {life.incarnation for life in self.lives.values()}
        return not self.learners[group] <= alive or any(
            life.stopped for life in self.lives.values() if life.incarnation in self.learners[group]
        )

    def collect(self, group: str) -> None:
        """Every rank of the group is there: one update, the same on all of them."""
        members = self._members(group)
        by_rank = sorted(members, key=_first_rank)
        for life in members:
            learn = life.learning
            assert learn is not None
            if learn.restore is not None:
                assert learn.restore.weights.digest in self.committed
                life.content = learn.restore.weights.digest
        for life in members:
            learn = life.learning
            assert learn is not None
            if learn.sync_from is not None:
                life.content = _holder(by_rank, learn.sync_from).content
        before = {life.content for life in members}
        assert len(before) == 1, f"{group}: the ranks start from {before}"
        learn = by_rank[0].learning
        assert learn is not None
        shares = [life.learning.minibatches for life in by_rank if life.learning is not None]
        after = updated(before.pop(), shares)
        self.checks.collected(learn, after)
        for life in members:
            life.content, life.version, life.trained = after, learn.version + 1, True

    def report(self, life: WorkerIncarnation) -> None:
        learn = life.learning
        assert learn is not None
        life.learning, life.trained = None, False
        version = PolicyVersion(learn.version + 1)
        origin: dict[str, Any] = {
            "job": JOB,
            "epoch": learn.epoch,
            "step": learn.step,
            "attempt": learn.attempt,
        }
        events: list[RunEvent] = []
        if learn.first_rank == 0:
            weights = blob(life.content)
            (self.committed if learn.checkpoint else self.flight).add(weights.digest)
            if learn.checkpoint:
                optimiser = blob(f"optimiser of {life.content}")
                self.committed.add(optimiser.digest)
                saved = Checkpoint(version=version, weights=weights, optimiser=optimiser)
                events.append(CheckpointCommitted(**origin, checkpoint=saved))
            policy = PolicyRef(version=version, weights=weights)
            events.append(PolicyPublished(**origin, policy=policy, metrics=None))
        finished = PolicyUpdateFinished(
            **origin,
            worker=life.worker,
            incarnation=life.incarnation,
            version=version,
            seconds=1.0,
        )
        self._report(life, *events, finished)

    # --- the coordinator

    def restart(self, *, blobs_kept: bool = True) -> None:
        """Killed and rebuilt from its journal, which has to give the same commands."""
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
        """The host: every process and the shared memory are gone, the store is not.

        The session comes up again, with the first so many of its workers.
        """
        self.lives.clear()
        self.gone.clear()
        self.starting = set(sorted(self.ranks)[:workers])
        answers = [p for p in self.log if isinstance(p.event, RolloutFinished)]
        # who joined is gone, and a coordinator that was about to come up is, too
        decided = RolloutFinished | WorkerJoined | SessionResumed
        rest = [posted for posted in self.log if not isinstance(posted.event, decided)]
        self.log = answers
        self.lose_blobs()
        known = {worker: known.info for worker, known in self.state.workers.items()}
        for lost in lost_workers(known, self.state, heartbeats={}):
            self.fence[lost.worker] = lost.incarnation + 1
            self.post("coordinator", lost)
        for _ in range(len(self.log)):
            self.deliver()
        self.log = [*rest, *self.log]

    def lose_blobs(self) -> None:
        self.flight.clear()
        self.blobs_were_lost = True
        self.restart(blobs_kept=False)

    # --- the end of all faults

    def calm(self) -> None:
        """Whoever is stopped goes on, somebody comes back, all others' leases end."""
        for life in list(self.lives.values()):
            life.stopped = False
        if self.gone and not self.lives and not self.starting:
            self.come_back(min(self.gone))
        for worker in sorted(self.gone):
            self.observe(worker)

    def run_out(self, most: int) -> None:
        """Without faults the job ends, within so many deliveries."""
        limit = len(self.journal) + most
        while not self.ended:
            moves = self.moves()
            assert moves, f"stuck: {self.summary()}"
            for move in moves:
                if move in self.moves():  # those before it may have taken its life
                    self.do(move)
            assert len(self.journal) < limit, f"no end: {self.summary()}"

    def summary(self) -> str:
        state = self.state
        duties = {w: (k.duty.value, k.trainer_version) for w, k in state.workers.items()}
        unsettled = None if state.batch is None else state.batch.unsettled
        kinds = Counter(type(event).__name__ for event in self.delivered[-30:])
        return (
            f"{state.phase}, step {state.step}, version {state.version} of {state.target}, "
            f"policy {state.policy.version}, attempt {state.update_attempt}, plans "
            f"{list(state.plans)}, workers {duties}, returning {set(state.returning_workers)}, "
            f"unsettled {unsettled}, pending {self.pending}, lately {dict(kinds)}"
        )


def answer(life: WorkerIncarnation, prompt: PromptIssued) -> RolloutFinished:
    # long enough that it may pay to buy seconds for learning from them
    length = 4000 * (1 + mix(prompt.step, prompt.prompt, prompt.member) % 5)
    return RolloutFinished(
        job=JOB,
        epoch=prompt.epoch,
        step=prompt.step,
        attempt=prompt.attempt,
        worker=life.worker,
        incarnation=life.incarnation,
        purpose=prompt.purpose,
        prompt=prompt.prompt,
        member=prompt.member,
        prompt_tokens=prompt.tokens,
        tokens=Tensor(dtype="int32", shape=(length,), data=b""),
        logprobs=Tensor(dtype="float32", shape=(length,), data=b""),
        text="",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        policies=(),
        drafters=(),
        origins=(),
        batches=(),
        decode_seconds=1.0,
        stop="stop",
    )


def tallies(speedup: float, number: int, drafter: DrafterRef | None) -> tuple[StrategyTally, ...]:
    """Control runs of 32 tokens take about a second; with speculation so much less.

    One drafter in four does worse in rollouts than its canary said.
    """
    version = NAMED if drafter is None else drafter.version
    length = 1 if version % 4 == 3 else 2
    runs = [1.0 + 0.1 * (-1) ** (number + i) for i in range(3)]
    common: dict[str, Any] = {"bucket": 1 << number % 3, "explored": 0, "expected": 0.0}
    control = ControlRuns(
        count=len(runs),
        tokens_squared=len(runs) * 32.0**2,
        seconds_squared=sum(seconds**2 for seconds in runs),
        product=32.0 * sum(runs),
    )
    return (
        StrategyTally(
            strategy=Draft(depth=2),
            drafter=version,
            control=None,
            steps=3200 // length,
            rows=3200 // length,
            tokens=3200,
            seconds=100.0 / speedup,
            **common,
        ),
        StrategyTally(
            strategy=Off(),
            drafter=None,
            control=control,
            steps=32 * len(runs),
            rows=32 * len(runs),
            tokens=32 * len(runs),
            seconds=sum(runs),
            **common,
        ),
    )


def reward(spec: JobSpec, done: RolloutFinished) -> float:
    """0 or 1; the attempt has a say, so that a score for the wrong answer shows."""
    return float(mix(spec.seed, done.step, done.prompt, done.member, done.attempt) % 2)


def updated(content: str, shares: Sequence[tuple[MinibatchShare, ...]]) -> str:
    """The weights after an update, as a name that says what went into them."""
    refs = sorted(
        (PromptIndex(ref.prompt), ref.member)
        for worker in shares
        for share in worker
        for rank in share.ranks
        for ref in rank
    )
    if not refs:
        return content  # nothing to learn: the bytes, and so the digest, stay the same
    number = mix(*content.encode(), *(part for ref in refs for part in ref))
    return f"{number:016x}"


def _first_rank(life: WorkerIncarnation) -> int:
    assert life.learning is not None
    return life.learning.first_rank


def _holder(by_rank: list[WorkerIncarnation], rank: int) -> WorkerIncarnation:
    return next(life for life in reversed(by_rank) if _first_rank(life) <= rank)
