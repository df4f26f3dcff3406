"""What has to hold after every decision, from books that are kept apart from `decide`."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.life import INITIAL, meeting
from tlt.messages import (
    BlobRef,
    GiveUpSpeculation,
    IssuePrompts,
    KeepRollout,
    Learn,
    ReplaceRanks,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunCommand,
    RunEvent,
    StartRollout,
    StopSpeculation,
    ToWorker,
)
from tlt.policies.run_state import DUTIES, Duty, Phase, RunState
from tlt.policies.training import Plan
from tlt.types import Incarnation

if TYPE_CHECKING:
    from tests.simulation.world import World

# step, purpose, prompt, member
Place = tuple[int, str, int, int]
DutyCommand = StartRollout | Learn | ReplaceRanks

_TOLD = {StartRollout: Duty.ROLLOUT, Learn: Duty.LEARN, ReplaceRanks: Duty.LEAVING}


def _place(event: RolloutFinished | RolloutScored | RolloutDropped) -> Place:
    return event.step, event.purpose, event.prompt, event.member


class Checks:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._told: dict[Incarnation, Duty] = {}
        # the members of every round, in the order in which the rounds were opened
        self.rounds: dict[tuple[int, str], set[Place]] = {}
        self.closed: set[tuple[int, str]] = set()
        self.finished: dict[Place, tuple[int, int]] = {}
        self.scores: dict[Place, dict[int, float]] = {}
        self.dropped: set[Place] = set()
        self.plans: dict[int, Plan] = {}
        # what the weights of each version have to be, whoever learned them and how often
        self.contents: dict[int, str] = {0: INITIAL}
        self.meetings: set[str] = set()
        self._plain: set[Incarnation] = set()
        self._given_up = False

    def decided(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        self._write_down(before, event, commands)
        self._check_growth(before, after)
        self._check_duties(before, after)
        self._check_rounds(before, after)
        self._check_plans(after)
        self._check_commands(after, commands)
        self._check_fence(before, event, after, commands)
        self._check_speculation(after, commands)

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
        for worker, incarnation in before.newest.items():
            assert after.newest[worker] >= incarnation

    def _check_duties(self, before: RunState, after: RunState) -> None:
        """A life's duty goes the ways of the table; within one decision it may go two of them."""
        for worker, now in after.workers.items():
            old = before.workers.get(worker)
            assert now.info.incarnation <= after.newest[worker]
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
        learning = {k.info.incarnation for k in before.workers.values() if k.duty is Duty.LEARN}
        alive = {k.info.incarnation: k for k in after.workers.values()}
        published = after.policy.version == after.target
        if after.phase is Phase.LEARNING and not published and not learning <= alive.keys():
            assert all(alive[i].duty is Duty.LEAVING for i in learning & alive.keys())

    def _check_commands(self, after: RunState, commands: Sequence[RunCommand]) -> None:
        """At most one duty for a worker at a time; whoever has one has been told so."""
        told = [c for c in commands if isinstance(c, DutyCommand)]
        assert all(count == 1 for count in Counter(c.worker for c in told).values())
        for command in told:
            self._told[command.incarnation] = _TOLD[type(command)]
        for command in commands:
            if isinstance(command, ToWorker):
                assert command.incarnation == after.newest[command.worker]
        if after.phase is not Phase.ENDED:
            for known in after.workers.values():
                if known.duty is not Duty.IDLE:
                    assert self._told[known.info.incarnation] is known.duty
        learns = [c for c in commands if isinstance(c, Learn)]
        if learns:
            self._check_learn(after, learns)

    def _check_learn(self, after: RunState, learns: list[Learn]) -> None:
        """One attempt: the same world for all, every sample of the plan on exactly one rank."""
        first = learns[0]
        assert not after.returning
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
        old, new = before.round, after.round
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

    def _check_plan(self, plan: Plan) -> None:
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
        if incarnation < before.newest.get(worker, -1):
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
        assert after.speculates != self._given_up
        if self._given_up and after.phase is not Phase.ENDED:
            assert self._plain >= {k.info.incarnation for k in after.workers.values()}
        if after.speculates and self._world.speedup < 1.0:
            assert sum(spent.runs for spent in after.spending.values()) < 12

    # --- what the world finds out

    def collected(self, learn: Learn, content: str) -> None:
        """An update of a version gives the same weights every time: no sample twice, none left."""
        version = learn.version + 1
        assert self.contents.setdefault(version, content) == content, f"version {version}"

    def is_in_use(self, weights: BlobRef) -> bool:
        state = self._world.state
        used = [state.policy, *([] if state.previous is None else [state.previous])]
        return state.phase is not Phase.ENDED and any(p.weights == weights for p in used)

    def unreadable(self, command: StartRollout) -> None:
        """Only what is out of date, or lost with the shared memory, cannot be read."""
        state = self._world.state
        known = state.workers.get(command.worker)
        current = known is not None and known.info.incarnation == command.incarnation
        if current and state.policy == command.policy and state.phase is not Phase.ENDED:
            assert self._world.blobs_were_lost, f"{command.policy} is gone"

    def samples_gone(self, command: Learn) -> None:
        """Rollouts that an update needs are kept."""
        known = self._world.state.workers.get(command.worker)
        current = known is not None and known.info.incarnation == command.incarnation
        assert not current or known.duty is not Duty.LEARN or self._world.ended

    def at_the_end(self) -> None:
        """All rounds were closed, every step took the policy on by one version."""
        state = self._world.state
        algorithm = state.spec.algorithm
        assert state.version == algorithm.steps
        assert state.policy.version == state.version
        last = (int(state.step), "eval" if algorithm.eval_every else "train")
        assert set(self.rounds) - self.closed <= {last}
        assert sorted(self.plans) == list(range(algorithm.steps))
        assert [p.step for _, p in sorted(self.plans.items())] == list(range(algorithm.steps))
        assert state.policy.weights is not None
        assert state.policy.weights.digest == self.contents[algorithm.steps]
