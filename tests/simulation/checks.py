"""Invariants after every decision, from records kept apart from `decide`."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.drafter_checks import DrafterChecks
from tests.simulation.incarnation import INITIAL, WorkerIncarnation, meeting
from tests.simulation.sampling_checks import SamplingChecks
from tlt.base.id_types import NAMED, Incarnation
from tlt.policies.algorithm.sample_sharding import UpdatePlan
from tlt.policies.run.run_state import DUTIES, Duty, Phase, RunState, count_engines
from tlt.protocol.commands import (
    DiscardBlobs,
    GiveUpSpeculation,
    IssuePrompts,
    ReleaseBlobs,
    ReplaceRanks,
    ResumeSpeculation,
    RunCommand,
    StartRollout,
    StopDrafterTraining,
    ToWorker,
    TrainDrafter,
    UpdatePolicy,
)
from tlt.protocol.events import (
    DrafterRefused,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
)
from tlt.protocol.refs import BlobRef

if TYPE_CHECKING:
    from tests.simulation.world import World

# step, purpose, prompt, member
AnswerKey = tuple[int, str, int, int]
DutyCommand = StartRollout | UpdatePolicy | ReplaceRanks

_DUTIES_BY_COMMAND: dict[type[RunCommand], Duty] = {
    StartRollout: Duty.ROLLOUT,
    TrainDrafter: Duty.DRAFTER_TRAINING,
    StopDrafterTraining: Duty.STOPPING,
    UpdatePolicy: Duty.POLICY_UPDATE,
    ReplaceRanks: Duty.RESTARTING,
}


def _answer_key(event: RolloutFinished | RolloutScored | RolloutDropped) -> AnswerKey:
    return event.step, event.purpose, event.prompt, event.member


class Checks:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.duties: dict[Incarnation, Duty] = {}
        self.drafter = DrafterChecks(world, self)
        self.sampling = SamplingChecks(self)
        # the members of every rollout batch, in the order in which the batches were opened
        self.batches: dict[tuple[int, str], set[AnswerKey]] = {}
        self.closed: set[tuple[int, str]] = set()
        # the answers of training groups that were issued and are in no update's batch yet
        self.open: set[AnswerKey] = set()
        # by step of an update and prompt: the step that issued the group
        self.issued_in: dict[tuple[int, int], int] = {}
        # blobs that the run's folder ever had to hold
        self.named: set[str] = set()
        # the answers that count
        self.finished: dict[AnswerKey, RolloutFinished] = {}
        self.scores: dict[AnswerKey, dict[int, float | None]] = {}
        self.dropped: set[AnswerKey] = set()
        self.plans: dict[int, UpdatePlan] = {}
        # the weights of each version, the same in every attempt
        self.contents: dict[int, str] = {0: INITIAL}
        self.meetings: set[str] = set()
        self._given_up = False
        # True once published weights were lost with the shared memory
        self.lost_weights = False

    @property
    def keeps_steps_apart(self) -> bool:
        return self._world.spec.algorithm.staleness > 0

    def decided(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        self._write_down(before, event, after, commands)
        self.named |= {blob.digest for blob in _in_the_folder(after)}
        self._check_growth(before, after)
        self._check_duties(before, after)
        self._check_evaluations(before, after)
        self._check_plans(after)
        self._check_commands(after, commands)
        self._check_fence(before, event, after, commands)
        self._check_speculation(after, commands)
        self.drafter.check_sessions(before, event, commands)
        self.drafter.check_drafter(before, event, after, commands)

    def _write_down(
        self, before: RunState, event: RunEvent, after: RunState, commands: Sequence[RunCommand]
    ) -> None:
        match event:
            case RolloutScored():
                self.scores.setdefault(_answer_key(event), {})[event.attempt] = event.reward
            case RolloutDropped() if before.phase is not Phase.ENDED:
                if _answer_key(event) not in self.finished:
                    self.dropped.add(_answer_key(event))
            case RolloutFinished():
                known = before.workers.get(event.worker)
                current = known is not None and known.info.incarnation == event.incarnation
                if current and _answer_key(event) not in self.dropped:
                    self.finished.setdefault(_answer_key(event), event)
            case DrafterRefused():
                if event.version in (NAMED, before.drafter.adoption.version_in_use):
                    self.drafter.refused.setdefault(event.version, set()).add(event.incarnation)
            case _:
                pass
        for command in commands:
            if isinstance(command, IssuePrompts):
                self.sampling.issue(command, after)

    def _check_growth(self, before: RunState, after: RunState) -> None:
        assert after.policy.version >= before.policy.version
        assert after.step >= before.step
        assert after.epoch >= before.epoch
        assert after.policy.target_version >= after.policy.version
        for worker, incarnation in before.newest_incarnations.items():
            # it may have forgotten a worker that serves another job
            assert after.newest_incarnations.get(worker, incarnation) >= incarnation

    def _check_duties(self, before: RunState, after: RunState) -> None:
        """Assert that duties change by at most two transitions of the table, and are counted."""
        counts: Counter[Duty] = Counter()
        for known in after.workers.values():
            counts[known.duty] += count_engines(after, [known])
        assert counts == {k: v for k, v in after.membership.engines.items() if v}
        for worker, now in after.workers.items():
            old = before.workers.get(worker)
            assert now.info.incarnation <= after.newest_incarnations[worker]
            if old is None or old.info.incarnation != now.info.incarnation:
                continue
            reachable = {old.duty} | DUTIES[old.duty]
            reachable |= {duty for middle in DUTIES[old.duty] for duty in DUTIES[middle]}
            assert now.duty in reachable
            if old.duty is Duty.RESTARTING:
                assert now.duty is Duty.RESTARTING
        self._check_abandoned(before, after)

    def _check_abandoned(self, before: RunState, after: RunState) -> None:
        """Assert that all members leave a collective that lost one before it published."""
        learning = {
            k.info.incarnation for k in before.workers.values() if k.duty is Duty.POLICY_UPDATE
        }
        alive = {k.info.incarnation: k for k in after.workers.values()}
        published = after.policy.current.version == after.policy.target_version
        if after.phase is Phase.POLICY_UPDATE and not published and not learning <= alive.keys():
            assert all(alive[i].duty is Duty.RESTARTING for i in learning & alive.keys())

    def _check_commands(self, after: RunState, commands: Sequence[RunCommand]) -> None:
        """Assert that workers were sent their duties, at most one each in a decision."""
        sent = [c for c in commands if isinstance(c, DutyCommand)]
        assert all(count == 1 for count in Counter(c.worker for c in sent).values())
        for command in commands:
            if isinstance(command, ToWorker) and type(command) in _DUTIES_BY_COMMAND:
                self.duties[command.incarnation] = _DUTIES_BY_COMMAND[type(command)]
        for command in commands:
            if isinstance(command, ToWorker):
                assert command.incarnation == after.newest_incarnations[command.worker]
        if after.phase is not Phase.ENDED:
            for known in after.workers.values():
                if known.duty is not Duty.IDLE:
                    assert self.duties[known.info.incarnation] is known.duty
        learns = [c for c in commands if isinstance(c, UpdatePolicy)]
        if learns:
            self._check_learn(after, learns)

    def _check_learn(self, after: RunState, learns: list[UpdatePolicy]) -> None:
        """Assert that an update covers all ranks, and each sample of its plan is on exactly one."""
        first = learns[0]
        assert not after.returning_workers
        assert meeting(first) not in self.meetings
        self.meetings.add(meeting(first))
        assert {c.worker for c in learns} == set(after.workers)
        for name in ("group", "world", "attempt", "epoch", "version", "step", "rendezvous"):
            assert len({getattr(c, name) for c in learns}) == 1
        assert len({(c.sync_from, c.checkpoint, c.reload) for c in learns}) == 1
        assert len({len(c.minibatches) for c in learns}) == 1
        ranks = [
            c.first_rank + i for c in learns for i in range(after.workers[c.worker].info.ranks)
        ]
        assert ranks == list(range(first.world))
        for command in learns:
            info = after.workers[command.worker].info
            assert all(len(share.ranks) == info.ranks for share in command.minibatches)
        refs = [
            ref for c in learns for share in c.minibatches for rank in share.ranks for ref in rank
        ]
        plan = self.plans[first.version]
        given = Counter((ref.prompt, ref.member, ref.advantage) for ref in refs)
        assert given == Counter((s.prompt, s.member, s.advantage) for s in plan.samples)
        for ref in refs:
            step = self.issued_in[first.step, ref.prompt]
            assert ref.answer == self.finished[step, "train", ref.prompt, ref.member].answer

    def _check_evaluations(self, before: RunState, after: RunState) -> None:
        """Assert that an evaluation closes when each answer is either scored or dropped."""
        old, new = before.batch, after.batch
        if (
            old is None
            or old.purpose == "train"
            or (after.phase is Phase.ENDED and new is not None)
        ):
            return
        if new is None or (new.step, new.purpose) != (old.step, old.purpose):
            self._close((int(old.step), str(old.purpose)))

    def _close(self, key: tuple[int, str]) -> None:
        assert key not in self.closed
        self.closed.add(key)
        for answer in self.batches[key]:
            assert self.is_scored(answer) != (answer in self.dropped), answer

    def _close_step(self, step: int, after: RunState) -> None:
        """Assert that an update's groups are complete; the others are carried over or put off."""
        put_off = set[int]() if after.cursor is None else {*after.cursor.deferred}
        left = {answer for answer in self.open if answer[2] in {*after.carried, *put_off}}
        if self.keeps_steps_apart:
            left = {answer for answer in self.open if answer[0] > step}
        closed = self.open - left
        prompts = {answer[2] for answer in left}
        self.open = set[AnswerKey]() if after.spec.rollout.defer_long else left
        if after.spec.rollout.defer_long:
            self.sampling.put_off |= prompts
            assert put_off == self.sampling.put_off
        else:
            assert prompts == {*after.carried, *(() if after.ahead is None else after.ahead.groups)}
        self.batches[step, "train"] = closed
        self.issued_in |= {(step, answer[2]): answer[0] for answer in closed}
        self._close((step, "train"))

    def is_scored(self, answer: AnswerKey) -> bool:
        """Return True if the answer that counts has a score, even one that leaves it out."""
        if answer not in self.finished:
            return False
        return self.finished[answer].attempt in self.scores.get(answer, {})

    def score(self, answer: AnswerKey) -> float | None:
        """Return the reward of the answer that counts."""
        if not self.is_scored(answer):
            return None
        return self.scores[answer][self.finished[answer].attempt]

    def _check_plans(self, after: RunState) -> None:
        for version, plan in after.policy.plans.items():
            if version not in self.plans:
                self.plans[version] = plan
                self._close_step(int(plan.step), after)
                self._check_plan(plan)
                self.sampling.check_plan(plan, after)
            assert self.plans[version] is plan or self.plans[version] == plan

    def _check_plan(self, plan: UpdatePlan) -> None:
        """Assert that a plan holds exactly the scored answers of groups with different scores."""
        groups: dict[int, dict[int, float]] = {}
        for answer in self.batches[plan.step, "train"]:
            score = self.score(answer)
            if score is not None:
                groups.setdefault(answer[2], {})[answer[3]] = score
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
        """Assert that events of an old incarnation change nothing."""
        worker, incarnation = getattr(event, "worker", None), getattr(event, "incarnation", None)
        if worker is None or incarnation is None:
            return
        if incarnation < before.newest_incarnations.get(worker, -1):
            assert after == before
            assert not commands

    def _check_speculation(self, after: RunState, commands: Sequence[RunCommand]) -> None:
        """Assert that speculation is given up only if it is slower, and that workers obey."""
        for command in commands:
            match command:
                case GiveUpSpeculation():
                    assert not self._given_up
                    assert self._world.speedup < 1.0
                    assert command.low < command.savings < command.high < 0.0
                    self._given_up = True
                case ResumeSpeculation():
                    assert self._given_up
                    self._given_up = False
                case StartRollout():
                    assert command.speculate != self._given_up
                case _:
                    pass
        assert after.speculation_allowed != self._given_up

    # --- called by the world

    def check_version(self, finished: RolloutFinished, version: int) -> None:
        """Assert that a step's answers have the weights of the step before, or the newest ones."""
        if self.keeps_steps_apart and finished.purpose == "train":
            first = max(finished.step - 1, self._world.state.policy.initial_version)
            assert version == first or (self.lost_weights and version == first + 1)

    def check_repeated_update(self, learn: UpdatePolicy, content: str) -> None:
        """Assert that a repeated update of a version gives the same weights."""
        version = learn.version + 1
        assert self.contents.setdefault(version, content) == content, f"version {version}"

    def is_in_use(self, weights: BlobRef) -> bool:
        state = self._world.state
        if state.phase is Phase.ENDED:
            return False
        used = [
            state.policy.current,
            *([] if state.policy.previous is None else [state.policy.previous]),
        ]
        return any(weights in p.blobs for p in used) or weights in _blobs_of_the_drafter(state)

    def check_released(self, command: ReleaseBlobs | DiscardBlobs) -> None:
        assert not any(map(self.is_in_use, command.blobs)), command
        if isinstance(command, DiscardBlobs):
            assert not _in_the_folder(self._world.state) & set(command.blobs), command

    def check_unreadable_weights(self, command: StartRollout) -> None:
        """Assert that unreadable weights are out of date or were lost with the shared memory."""
        state = self._world.state
        known = state.workers.get(command.worker)
        current = known is not None and known.info.incarnation == command.incarnation
        if current and state.policy.current == command.policy and state.phase is not Phase.ENDED:
            assert self._world.blobs_were_lost, f"{command.policy} is gone"

    def is_current(self, incarnation: WorkerIncarnation) -> bool:
        known = self._world.state.workers.get(incarnation.worker)
        ended = self._world.state.phase is Phase.ENDED
        return known is not None and known.info.incarnation == incarnation.number and not ended

    def check_end(self) -> None:
        """Assert that all batches are closed, and each step made one policy version."""
        state = self._world.state
        left = self._world.drafter_blobs.announced & self._world.flight
        assert not left, f"never released: {left}"
        kept = {blob.digest for blob in _in_the_folder(state)}
        # a drafter may fail to be committed just before the job ends
        assert kept <= self._world.committed | set(self._world.drafter_blobs.uncommitted.values())
        # files of an abandoned attempt may remain
        assert not (self._world.committed - kept) & self.named
        assert not self.sampling.put_off
        algorithm = state.spec.algorithm
        assert state.policy.version == algorithm.steps
        assert state.policy.current.version == state.policy.version
        last = (int(state.step), "eval" if algorithm.eval_every else "train")
        assert set(self.batches) - self.closed <= {last}
        assert not self.open, "a group was lost"
        steps = list(range(state.policy.initial_version, algorithm.steps))
        assert sorted(self.plans) == steps
        assert [p.step for _, p in sorted(self.plans.items())] == steps
        assert state.policy.current.weights is not None
        assert state.policy.current.weights.digest == self.contents[algorithm.steps]


def _in_the_folder(state: RunState) -> set[BlobRef]:
    """Return the blobs that must stay in the run's folder."""
    adoption = state.drafter.adoption
    drafters = (adoption.used, adoption.previous, adoption.fallback)
    blobs = {drafter.weights for drafter in drafters if drafter is not None}
    if state.policy.checkpoint is not None:
        blobs |= set(state.policy.checkpoint.blobs)
    if state.policy.best is not None:
        blobs |= {state.policy.best.weights, state.policy.best.adapter} - {None}
    return blobs


def _blobs_of_the_drafter(state: RunState) -> set[BlobRef]:
    """Return the blobs that workers may be commanded to read."""
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
