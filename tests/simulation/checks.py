"""What has to hold after every decision, from books that are kept apart from `decide`."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.drafter_training import Part, name_of
from tests.simulation.incarnation import INITIAL, WorkerIncarnation, meeting
from tlt.ids import NAMED, Digest, DrafterVersion, Incarnation
from tlt.policies.drafter.learning_curve import MOST_EVALUATIONS
from tlt.policies.job.run_state import DUTIES, Duty, Phase, RunState
from tlt.policies.job.update_plan import UpdatePlan
from tlt.protocol.commands import (
    AdoptDrafter,
    DiscardBlobs,
    GiveUpSpeculation,
    IssuePrompts,
    KeepRollout,
    MergeDrafter,
    ReleaseBlobs,
    ReplaceRanks,
    RunCommand,
    StartRollout,
    StopDrafterTraining,
    StopSpeculation,
    ToWorker,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterMerged,
    DrafterRefused,
    DrafterTrainingStopped,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
)
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterRef

if TYPE_CHECKING:
    from tests.simulation.world import World

# step, purpose, prompt, member
Place = tuple[int, str, int, int]
DutyCommand = StartRollout | UpdatePolicy | ReplaceRanks

_TOLD: dict[type[RunCommand], Duty] = {
    StartRollout: Duty.ROLLOUT,
    TrainDrafter: Duty.DRAFTER_TRAINING,
    StopDrafterTraining: Duty.STOPPING,
    UpdatePolicy: Duty.POLICY_UPDATE,
    ReplaceRanks: Duty.LEAVING,
}


def _place(event: RolloutFinished | RolloutScored | RolloutDropped) -> Place:
    return event.step, event.purpose, event.prompt, event.member


class Checks:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._told: dict[Incarnation, Duty] = {}
        # the members of every round, in the order in which the rounds were opened
        self.rounds: dict[tuple[int, str], set[Place]] = {}
        self.closed: set[tuple[int, str]] = set()
        # what the run's folder had to hold at any time
        self.named: set[str] = set()
        self.finished: dict[Place, tuple[int, int]] = {}
        self.scores: dict[Place, dict[int, float]] = {}
        self.dropped: set[Place] = set()
        self.plans: dict[int, UpdatePlan] = {}
        # what the weights of each version have to be, whoever learned them and how often
        self.contents: dict[int, str] = {0: INITIAL}
        self.meetings: set[str] = set()
        self._plain: set[Incarnation] = set()
        self._given_up = False
        # the lesson of each incarnation that was told to train and has not said that it stopped
        self.training: dict[Incarnation, int] = {}
        self.shape: Digest | None = None
        self.versions: list[DrafterVersion] = []
        # deltas that were heard of; those in some trunk that counted; those that never will be
        self.known: set[Part] = set()
        self.merged: set[Part] = set()
        self.void: set[Part] = set()
        # how often drafters were adopted, and the one before again, and seconds bought
        self.adopted = 0
        self.returned = 0
        self.bought = 0
        # by version of a drafter, who has said that it could not load it
        self.refused: dict[DrafterVersion, set[Incarnation]] = {}

    def decided(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        self._write_down(before, event, commands)
        self.named |= {blob.digest for blob in _in_the_folder(after)}
        self._check_growth(before, after)
        self._check_duties(before, after)
        self._check_rounds(before, after)
        self._check_plans(after)
        self._check_commands(after, commands)
        self._check_fence(before, event, after, commands)
        self._check_speculation(after, commands)
        self._check_training(before, event, commands)
        self._check_school(before, event, after, commands)

    def _write_down(
        self, before: RunState, event: RunEvent, commands: Sequence[RunCommand]
    ) -> None:
        match event:
            case RolloutScored():
                self.scores.setdefault(_place(event), {})[event.attempt] = event.reward
            case RolloutDropped() if before.phase is not Phase.ENDED:
                if _place(event) not in self.finished:
                    self.dropped.add(_place(event))
            case RolloutFinished() if event.purpose == "eval":
                known = before.workers.get(event.worker)
                current = known is not None and known.info.incarnation == event.incarnation
                if current and _place(event) not in self.dropped:
                    self.finished.setdefault(_place(event), (event.attempt, event.length))
            case DrafterRefused() if event.version is not None:
                if event.version in (NAMED, before.drafter.adoption.version_in_use):
                    self.refused.setdefault(event.version, set()).add(event.incarnation)
            case _:
                pass
        for command in commands:
            if isinstance(command, KeepRollout):
                assert isinstance(event, RolloutFinished)
                self._keep(command, event)
            elif isinstance(command, IssuePrompts):
                self._issue(command)

    def _keep(self, command: KeepRollout, event: RolloutFinished) -> None:
        """KeepRollout comes at most once per member, and never for a dropped one."""
        place = _place(event)
        assert place == (command.step, "train", command.prompt, command.member)
        assert place not in self.finished
        assert place not in self.dropped
        self.finished[place] = (event.attempt, event.length)

    def _issue(self, command: IssuePrompts) -> None:
        """Every round is issued once, with different prompts."""
        key = (command.step, command.purpose)
        assert key not in self.rounds
        assert len(set(command.prompts)) == len(command.prompts)
        self.rounds[key] = {
            (*key, prompt, member)
            for prompt in command.prompts
            for member in range(command.members)
        }

    def _check_growth(self, before: RunState, after: RunState) -> None:
        assert after.version >= before.version
        assert after.step >= before.step
        assert after.epoch >= before.epoch
        assert after.target >= after.version
        for worker, incarnation in before.newest_incarnations.items():
            assert after.newest_incarnations[worker] >= incarnation

    def _check_duties(self, before: RunState, after: RunState) -> None:
        """A life's duty goes the ways of the table; within one decision it may go two of them."""
        for worker, now in after.workers.items():
            old = before.workers.get(worker)
            assert now.info.incarnation <= after.newest_incarnations[worker]
            if old is None or old.info.incarnation != now.info.incarnation:
                continue
            reachable = {old.duty} | DUTIES[old.duty]
            reachable |= {duty for middle in DUTIES[old.duty] for duty in DUTIES[middle]}
            assert now.duty in reachable
            if old.duty is Duty.LEAVING:
                assert now.duty is Duty.LEAVING
        self._check_abandoned(before, after)

    def _check_abandoned(self, before: RunState, after: RunState) -> None:
        """A collective that lost a member before its version was out: nobody goes on with it."""
        learning = {
            k.info.incarnation for k in before.workers.values() if k.duty is Duty.POLICY_UPDATE
        }
        alive = {k.info.incarnation: k for k in after.workers.values()}
        published = after.policy.version == after.target
        if after.phase is Phase.POLICY_UPDATE and not published and not learning <= alive.keys():
            assert all(alive[i].duty is Duty.LEAVING for i in learning & alive.keys())

    def _check_commands(self, after: RunState, commands: Sequence[RunCommand]) -> None:
        """At most one duty for a worker at a time; whoever has one has been told so."""
        told = [c for c in commands if isinstance(c, DutyCommand)]
        assert all(count == 1 for count in Counter(c.worker for c in told).values())
        for command in commands:
            if isinstance(command, ToWorker) and type(command) in _TOLD:
                self._told[command.incarnation] = _TOLD[type(command)]
        for command in commands:
            if isinstance(command, ToWorker):
                assert command.incarnation == after.newest_incarnations[command.worker]
        if after.phase is not Phase.ENDED:
            for known in after.workers.values():
                if known.duty is not Duty.IDLE:
                    assert self._told[known.info.incarnation] is known.duty
        learns = [c for c in commands if isinstance(c, UpdatePolicy)]
        if learns:
            self._check_learn(after, learns)

    def _check_learn(self, after: RunState, learns: list[UpdatePolicy]) -> None:
        """One attempt: the same world for all, every sample of the plan on exactly one rank."""
        first = learns[0]
        assert not after.returning_workers
        assert meeting(first) not in self.meetings
        self.meetings.add(meeting(first))
        assert {c.worker for c in learns} == set(after.workers)
        for name in ("group", "world", "attempt", "epoch", "version", "step", "rendezvous"):
            assert len({getattr(c, name) for c in learns}) == 1
        assert len({(c.sync_from, c.checkpoint) for c in learns}) == 1
        assert len({len(c.minibatches) for c in learns}) == 1
        ranks = [
            c.first_rank + i for c in learns for i in range(after.workers[c.worker].info.ranks)
        ]
        assert ranks == list(range(first.world))
        for command in learns:
            info = after.workers[command.worker].info
            assert all(len(share.ranks) == info.ranks for share in command.minibatches)
        refs = Counter(
            (ref.prompt, ref.member, ref.advantage)
            for c in learns
            for share in c.minibatches
            for rank in share.ranks
            for ref in rank
        )
        plan = self.plans[first.version]
        assert refs == Counter((s.prompt, s.member, s.advantage) for s in plan.samples)

    def _check_rounds(self, before: RunState, after: RunState) -> None:
        """A round closes once all of its members are scored or dropped, none of them both."""
        old, new = before.batch, after.batch
        if old is None or (after.phase is Phase.ENDED and new is not None):
            return
        key = (int(old.step), str(old.purpose))
        if new is not None and (new.step, new.purpose) == key:
            return
        assert key not in self.closed
        self.closed.add(key)
        for place in self.rounds[key]:
            assert (self._score(place) is not None) != (place in self.dropped), place

    def _score(self, place: Place) -> float | None:
        """The score of the answer that counts."""
        if place not in self.finished:
            return None
        return self.scores.get(place, {}).get(self.finished[place][0])

    def _check_plans(self, after: RunState) -> None:
        for version, plan in after.plans.items():
            if version not in self.plans:
                self.plans[version] = plan
                self._check_plan(plan)
            assert self.plans[version] is plan or self.plans[version] == plan

    def _check_plan(self, plan: UpdatePlan) -> None:
        """Exactly the scored members of groups that don't all agree."""
        groups: dict[int, dict[int, float]] = {}
        for place in self.rounds[plan.step, "train"]:
            score = self._score(place)
            if score is not None:
                groups.setdefault(place[2], {})[place[3]] = score
        expected = {
            (prompt, member)
            for prompt, scores in groups.items()
            if len(set(scores.values())) > 1
            for member in scores
        }
        got = [(s.prompt, s.member) for s in plan.samples]
        assert len(got) == len(set(got))
        assert set(got) == expected

    def _check_fence(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        """What an incarnation says that is over changes nothing."""
        worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
        if worker is None or incarnation is None:
            return
        if incarnation < before.newest_incarnations.get(worker, -1):
            assert after == before
            assert not commands

    def _check_speculation(self, after: RunState, commands: Sequence[RunCommand]) -> None:
        """It is given up once, where it is slower; nobody goes on with it, whenever they joined."""
        self._plain |= {c.incarnation for c in commands if isinstance(c, StopSpeculation)}
        given_up = [c for c in commands if isinstance(c, GiveUpSpeculation)]
        if given_up:
            assert not self._given_up
            assert self._world.speedup < 1.0
            assert given_up[0].low < given_up[0].saved < given_up[0].high < 0.0
            self._given_up = True
        assert after.speculation_allowed != self._given_up
        if self._given_up and after.phase is not Phase.ENDED:
            assert self._plain >= {k.info.incarnation for k in after.workers.values()}
        if after.speculation_allowed and self._world.speedup < 1.0:
            assert sum(spent.runs for spent in after.decode_costs.values()) < 12

    def _check_training(
        self, before: RunState, event: RunEvent, commands: Sequence[RunCommand]
    ) -> None:
        """Who is told to decode or to learn has said that it trains no more."""
        if isinstance(event, DrafterTrainingStopped):
            told = self.training.pop(event.incarnation, event.training_session)
            if told != event.training_session:
                self.training[event.incarnation] = told
        for command in commands:
            if isinstance(command, StartRollout | UpdatePolicy):
                assert command.incarnation not in self.training, command
            elif isinstance(command, TrainDrafter):
                assert before.spec.drafter.train != "off"
                training_session = self.training.setdefault(
                    command.incarnation, command.training_session
                )
                assert training_session == command.training_session
            elif isinstance(command, StopDrafterTraining):
                assert self.training[command.incarnation] == command.training_session

    def _check_school(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        self._check_lineage(before, event, after)
        if after.phase is Phase.ENDED and before.phase is not Phase.ENDED:
            # the card of what the job leaves behind tells of it
            assert after.drafter.adoption.used == before.drafter.adoption.used
            assert after.drafter.adoption.live == before.drafter.adoption.live
        self._check_refused(before, event, after, commands)
        for command in commands:
            match command:
                case AdoptDrafter():
                    assert command.drafter == after.drafter.adoption.used
                    self._check_adopted(before, command.drafter)
                case MergeDrafter():
                    assert command.base == after.drafter.lineage.base
                    assert command.deltas == after.drafter.lineage.deltas
                    assert not self.versions or command.version > self.versions[-1]
                    self.versions.append(command.version)
                    assert self._told[command.incarnation] is Duty.DRAFTER_TRAINING
                case ReleaseBlobs() | DiscardBlobs():
                    self.lets_go(command)
                case _:
                    pass
        self.bought += before.phase is not after.phase and after.phase is Phase.RESERVED_TRAINING
        alive = {
            f"{known.info.incarnation}.{rank}"
            for known in after.workers.values()
            for rank in range(known.info.ranks)
        }
        assert after.drafter.lineage.newest_delta.keys() <= alive
        assert len(after.drafter.evidence.evaluations) <= MOST_EVALUATIONS
        if after.phase is Phase.RESERVED_TRAINING:
            assert any(
                known.duty in (Duty.DRAFTER_TRAINING, Duty.STOPPING)
                for known in after.workers.values()
            )

    def _check_refused(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        """Who could not load what is in use measures nothing against it, and teaches nobody."""
        used = after.drafter.adoption.version_in_use
        for command in commands:
            if isinstance(command, StartRollout) and command.drafter is not None:
                # it tries again
                self.refused.get(command.drafter.version, set()).discard(command.incarnation)
        without = self.refused.get(used, set())
        everybody = {known.info.incarnation for known in after.workers.values()}
        if used == NAMED and everybody <= without:
            return
        trains = {
            known.info.incarnation
            for known in after.workers.values()
            if known.duty is Duty.DRAFTER_TRAINING
        }
        assert not trains & without
        for command in commands:
            if isinstance(command, TrainDrafter | MergeDrafter):
                assert command.incarnation not in without
        if isinstance(event, DrafterRefused) and event.version == used:
            known = before.workers.get(event.worker)
            if known is not None and known.info.incarnation == event.incarnation:
                # somebody has it
                assert everybody - without

    def _check_adopted(self, before: RunState, drafter: DrafterRef | None) -> None:
        last = before.drafter.adoption.used
        if last is not None and (drafter is None or drafter.version < last.version):
            assert drafter in (before.drafter.adoption.fallback, before.drafter.adoption.previous)
            self.returned += 1
            return
        assert drafter is not None
        self.shape = self.shape or drafter.architecture
        assert drafter.architecture == self.shape
        self.adopted += 1

    def _check_lineage(self, before: RunState, event: RunEvent, after: RunState) -> None:
        """A delta goes into one trunk at most, and into none that it did not grow on."""
        parts, contents = self._world.school.parts, self._world.school.contents
        old, new = before.drafter.lineage, after.drafter.lineage
        if before.phase is Phase.ENDED or after.phase is Phase.ENDED:
            return
        if isinstance(event, DrafterDeltaReady):
            self.known |= contents[name_of(event.delta)]
        if isinstance(event, DrafterMerged) and old.merge is not None and new.merge is None:
            fresh = {part for delta in old.merge.deltas for part in contents[name_of(delta)]}
            assert parts[event.base.version] == parts.get(old.base.version, frozenset()) | fresh
            assert not fresh & self.merged
            assert not fresh & self.void
            self.merged |= fresh
            assert not fresh & {part for d in new.deltas for part in contents[name_of(d)]}
        used = after.drafter.adoption.used
        if new.base.root != old.base.root:
            begun = frozenset[Part]() if used is None else parts[used.version]
            parts[new.base.root] = begun
            learned = 0 if used is None else self._world.school.learned[used.version]
            assert (new.base.updates, new.base.micro_batches) == (learned // 2, learned)
            self.void |= self.known - begun
            assert not new.deltas
        for delta in new.deltas:
            assert self._world.school.grew_on[name_of(delta)] >= new.base.root

    # --- what the world finds out

    def collected(self, learn: UpdatePolicy, content: str) -> None:
        """An update of a version gives the same weights every time: no sample twice, none left."""
        version = learn.version + 1
        assert self.contents.setdefault(version, content) == content, f"version {version}"

    def is_in_use(self, weights: BlobRef) -> bool:
        state = self._world.state
        if state.phase is Phase.ENDED:
            return False
        used = [state.policy, *([] if state.previous_policy is None else [state.previous_policy])]
        return any(p.weights == weights for p in used) or weights in _blobs_of_the_drafter(state)

    def lets_go(self, command: ReleaseBlobs | DiscardBlobs) -> None:
        assert not any(map(self.is_in_use, command.blobs)), command
        if isinstance(command, DiscardBlobs):
            assert not _in_the_folder(self._world.state) & set(command.blobs), command

    def unreadable(self, command: StartRollout) -> None:
        """Only what is out of date, or lost with the shared memory, cannot be read."""
        state = self._world.state
        known = state.workers.get(command.worker)
        current = known is not None and known.info.incarnation == command.incarnation
        if current and state.policy == command.policy and state.phase is not Phase.ENDED:
            assert self._world.blobs_were_lost, f"{command.policy} is gone"

    def samples_gone(self, command: UpdatePolicy) -> None:
        """Rollouts that an update needs are kept."""
        known = self._world.state.workers.get(command.worker)
        current = known is not None and known.info.incarnation == command.incarnation
        assert not current or known.duty is not Duty.POLICY_UPDATE or self._world.ended

    def trunk_gone(self, life: WorkerIncarnation, base: DrafterBase) -> None:
        """Only a trunk that is out of date, or lost, cannot be read."""
        state, world = self._world.state, self._world
        assert base.weights is not None
        if self._is_current(life) and base == state.drafter.lineage.base:
            missed = world.school.is_missed(base.weights)
            assert world.blobs_were_lost or missed, f"{base} is gone"

    def drafter_gone(self, life: WorkerIncarnation, drafter: DrafterRef) -> None:
        """Whoever is late finds none; what is in use was committed."""
        state, world = self._world.state, self._world
        if self._is_current(life) and drafter == state.drafter.adoption.used:
            missed = world.school.is_missed(drafter.weights)
            assert world.blobs_were_lost or missed, f"{drafter} is gone"

    def _is_current(self, life: WorkerIncarnation) -> bool:
        known = self._world.state.workers.get(life.worker)
        ended = self._world.state.phase is Phase.ENDED
        return known is not None and known.info.incarnation == life.incarnation and not ended

    def rebased(
        self, life: WorkerIncarnation, rank: int, unmerged: set[int], base: DrafterBase
    ) -> None:
        """What a member adds to a trunk is not in it already, and was not given up."""
        if not self._is_current(life) or base != self._world.state.drafter.lineage.base:
            return
        own = {(int(life.incarnation), rank, number) for number in unmerged}
        assert not own & self._world.school.parts.get(base.version, frozenset())
        assert not own & self.void

    def at_the_end(self) -> None:
        """All rounds were closed, every step took the policy on by one version."""
        state = self._world.state
        left = self._world.school.heard_of & self._world.flight
        assert not left, f"never released: {left}"
        kept = {blob.digest for blob in _in_the_folder(state)}
        # what could not be kept, and ended with the job before anybody heard of it
        assert kept <= self._world.committed | set(self._world.school.not_kept.values())
        # what was written for an attempt that was given up lies there, too
        assert not (self._world.committed - kept) & self.named
        algorithm = state.spec.algorithm
        assert state.version == algorithm.steps
        assert state.policy.version == state.version
        last = (int(state.step), "eval" if algorithm.eval_every else "train")
        assert set(self.rounds) - self.closed <= {last}
        assert sorted(self.plans) == list(range(algorithm.steps))
        assert [p.step for _, p in sorted(self.plans.items())] == list(range(algorithm.steps))
        assert state.policy.weights is not None
        assert state.policy.weights.digest == self.contents[algorithm.steps]


def _in_the_folder(state: RunState) -> set[BlobRef]:
    """Return the blobs that have to stay in the run's folder."""
    adoption = state.drafter.adoption
    drafters = (adoption.used, adoption.previous, adoption.fallback)
    blobs = {drafter.weights for drafter in drafters if drafter is not None}
    if state.checkpoint is not None:
        blobs |= {state.checkpoint.weights, state.checkpoint.optimiser}
    if state.best is not None and state.best.weights is not None:
        blobs.add(state.best.weights)
    return blobs


def _blobs_of_the_drafter(state: RunState) -> set[BlobRef]:
    """Return the blobs that workers may be told to read."""
    lineage, used = state.drafter.lineage, state.drafter.adoption.used
    deltas = list(lineage.deltas)
    if lineage.merge is not None:
        deltas += lineage.merge.deltas
    blobs = {delta.blob for delta in deltas}
    if lineage.base.weights is not None:
        blobs.add(lineage.base.weights)
    if used is not None:
        blobs.add(used.weights)
    return blobs
