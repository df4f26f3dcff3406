"""A rollout batch: every member of every group is scored or dropped, exactly once."""

import math
from collections.abc import Iterator, Sequence

import msgspec

from tlt.base.id_types import Attempt, Member, PolicyVersion, PromptIndex, Purpose, Step
from tlt.policies.algorithm.advantages import agree
from tlt.protocol.events import (
    DecodingReported,
    RolloutCut,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
)
from tlt.protocol.refs import AnswerRef

# step, purpose and refills
QueueKey = tuple[Step, Purpose, int]
AnswerEvent = RolloutFinished | RolloutScored | RolloutDropped | RolloutCut


class Score(msgspec.Struct, frozen=True, array_like=True):
    attempt: Attempt
    # None if the answer is left out
    reward: float | None
    # of several rewards: what each gave
    parts: tuple[float | None, ...] = ()
    # of a held-out answer: what it says in the end
    final: str | None = None
    # the reward before the penalty for its length, if there was one
    unpenalised: float | None = None
    # None where that isn't known: a reward of 1 or more is taken for right
    correct: bool | None = None
    # of the answer's prompt, if rows name their sources
    source: str | None = None
    # what its environment has measured, by name
    measured: dict[str, float] = {}


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """The end of an attempt that was cut, and the tokens so far."""

    attempt: Attempt
    # attempts that don't count as tries
    excused: int
    # None without tokens
    answer: AnswerRef | None
    # True once it is in the queue again
    queued: bool = False


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One member of a group; a score may arrive before the answer that it belongs to."""

    finished: Attempt | None = None
    length: int = 0
    scores: tuple[Score, ...] = ()
    dropped: bool = False
    # it was cut off by a limit
    truncated: bool = False
    prompt_length: int = 0
    # None until it has finished
    ref: AnswerRef | None = None
    # the last attempt that was cut
    cut: Cut | None = None

    @property
    def is_cut(self) -> bool:
        """Return True if it is neither in the queue nor with a worker."""
        if self.cut is None or self.cut.queued:
            return False
        return self.finished is None and not self.dropped

    @property
    def score(self) -> Score | None:
        """Return the score of the attempt that finished first, once both are known."""
        if not self.dropped:
            # each event asks for those of its group: a generator would cost twice as much
            for score in self.scores:
                if score.attempt == self.finished:
                    return score
        return None

    @property
    def reward(self) -> float | None:
        """Return None as long as there is no score, and where it leaves the answer out."""
        score = self.score
        return None if score is None else score.reward

    @property
    def unpenalised(self) -> float | None:
        """Return the reward before the penalty for the answer's length."""
        score = self.score
        return self.reward if score is None or score.unpenalised is None else score.unpenalised

    @property
    def correct(self) -> bool:
        """Return True if it is right, once its score is known and if that counts it."""
        score, reward = self.score, self.unpenalised
        if score is None or reward is None:
            return False
        return reward >= 1.0 if score.correct is None else score.correct

    @property
    def settled(self) -> bool:
        return self.dropped or self.score is not None


class Group(msgspec.Struct, frozen=True, array_like=True):
    members: tuple[Answer, ...]

    @property
    def settled(self) -> bool:
        return all(answer.settled for answer in self.members)

    def scored(self) -> list[tuple[Member, Answer, float]]:
        """Return the answers that have a reward and aren't empty, with their rewards."""
        return [
            (Member(index), answer, answer.reward)
            for index, answer in enumerate(self.members)
            if answer.reward is not None and answer.length > 0
        ]

    @property
    def agrees(self) -> bool:
        """Return True if all rewards are the same, whatever the answers lost by their length."""
        rewards = [answer.unpenalised for _, answer, _ in self.scored()]
        return agree([reward for reward in rewards if reward is not None])

    @property
    def solved(self) -> bool:
        """Return True if all answers are right."""
        return all(answer.correct for answer in self.members)


class CarriedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that wasn't complete when its step ended."""

    group: Group
    # the step that issued it
    step: Step


class RolloutBatch(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    groups: dict[PromptIndex, Group]
    unsettled: int
    # of the weights that answer its prompts, unless they are lost
    version: PolicyVersion = PolicyVersion(0)
    opened_at: float = 0.0
    # False while drafter training doesn't pay: then its answers aren't kept for it
    keep_answers: bool = True
    # times that prompts went back to the queue
    requeues: int = 0
    # groups issued in place of others that agree; the last ones of `groups`
    extra: int = 0
    # rank seconds of decoding
    decode_work: float = 0.0
    # complete groups with which it ends, though others are unfinished; None: all
    wanted: int | None = None
    # complete groups; with `differing` those that agree don't count
    complete: int = 0
    differing: bool = False
    # the steps that issued groups which were carried over
    steps: dict[PromptIndex, Step] = {}

    @property
    def settled(self) -> bool:
        return self.unsettled == 0 or (self.wanted is not None and self.complete >= self.wanted)

    @property
    def refills(self) -> int:
        """Count the times that prompts were added to the queue since the batch was opened."""
        return self.requeues + self.extra

    @property
    def queue_key(self) -> QueueKey:
        """Identify the queue since it was last refilled; workers report which one they drained."""
        return self.step, self.purpose, self.refills

    def step_of(self, prompt: PromptIndex) -> Step:
        """Return the step that issued a group."""
        return self.steps.get(prompt, self.step)

    @property
    def unfinished(self) -> int:
        return sum(
            answer.finished is None and not answer.dropped
            for group in self.groups.values()
            for answer in group.members
        )

    @property
    def dropped(self) -> int:
        return sum(answer.dropped for group in self.groups.values() for answer in group.members)

    def lengths(self) -> list[int]:
        """Return the lengths of all answers in the order of the queue."""
        return [answer.length for group in self.groups.values() for answer in group.members]

    def rewards(self) -> list[float]:
        """Return the rewards of the answers that have one."""
        return [score.reward for score in self._scores() if score.reward is not None]

    def mean_parts(self, names: Sequence[str]) -> dict[str, float]:
        """Return the mean of each of several rewards, over the answers that it applies to."""
        means: dict[str, float] = {}
        scores = [score for score in self._scores() if score.parts]
        for index, name in enumerate(names):
            found = [score.parts[index] for score in scores]
            values = [value for value in found if value is not None]
            if values:
                means[name] = math.fsum(values) / len(values)
        return means

    def mean_measured(self) -> dict[str, float]:
        """Return the mean of all that environments have measured, over the answers that have it."""
        found: dict[str, list[float]] = {}
        for score in self._scores():
            for name, value in score.measured.items():
                found.setdefault(name, []).append(value)
        return {name: math.fsum(values) / len(values) for name, values in found.items()}

    def _scores(self) -> Iterator[Score]:
        for group in self.groups.values():
            for answer in group.members:
                if (score := answer.score) is not None:
                    yield score


def new_batch(
    step: Step, purpose: Purpose, prompts: Sequence[PromptIndex], members: Sequence[int]
) -> RolloutBatch:
    """Return a batch with so many answers to each prompt."""
    sizes = zip(prompts, members, strict=True)
    return RolloutBatch(
        step=step,
        purpose=purpose,
        groups={prompt: Group((Answer(),) * size) for prompt, size in sizes},
        unsettled=sum(members),
    )


def add_group(batch: RolloutBatch, prompt: PromptIndex, members: int) -> RolloutBatch:
    """Add a group in place of one that agrees."""
    return msgspec.structs.replace(
        batch,
        groups={**batch.groups, prompt: Group((Answer(),) * members)},
        unsettled=batch.unsettled + members,
        extra=batch.extra + 1,
    )


def is_decoding_of(batch: RolloutBatch, event: DecodingReported) -> bool:
    return (event.step, event.purpose) == (batch.step, batch.purpose)


def add_decode_work(batch: RolloutBatch, event: DecodingReported) -> RolloutBatch:
    work = batch.decode_work + sum(tally.work for tally in event.tallies)
    return msgspec.structs.replace(batch, decode_work=work)


def carry(
    batch: RolloutBatch, carried: dict[PromptIndex, CarriedGroup], wanted: int, *, differing: bool
) -> RolloutBatch:
    """Return a batch that also has groups of earlier steps, and ends with `wanted` ones."""
    groups = {prompt: each.group for prompt, each in carried.items()}
    members = [answer for group in groups.values() for answer in group.members]
    return msgspec.structs.replace(
        batch,
        groups={**groups, **batch.groups},
        unsettled=batch.unsettled + sum(not answer.settled for answer in members),
        wanted=wanted,
        complete=sum(_counts(group, differing) for group in groups.values()),
        differing=differing,
        steps={prompt: each.step for prompt, each in carried.items()},
    )


def split(batch: RolloutBatch) -> tuple[RolloutBatch, dict[PromptIndex, CarriedGroup]]:
    """Return a batch of the complete groups, and the other groups."""
    complete = {prompt: group for prompt, group in batch.groups.items() if group.settled}
    rest = {
        prompt: CarriedGroup(group=group, step=batch.step_of(prompt))
        for prompt, group in batch.groups.items()
        if prompt not in complete
    }
    return msgspec.structs.replace(batch, groups=complete, unsettled=0), rest


def queue_again(batch: RolloutBatch, prompt: PromptIndex, member: int) -> RolloutBatch:
    """Note that an answer that was cut is in the queue again."""
    members, replace = batch.groups[prompt].members, msgspec.structs.replace
    cut = members[member].cut
    assert cut is not None, "it was cut"
    answer = replace(members[member], cut=replace(cut, queued=True))
    group = Group((*members[:member], answer, *members[member + 1 :]))
    return replace(batch, groups={**batch.groups, prompt: group})


def _counts(group: Group, differing: bool) -> bool:
    return group.settled and not (differing and group.agrees)


def contains(batch: RolloutBatch, event: AnswerEvent) -> bool:
    group = batch.groups.get(event.prompt)
    return (
        event.purpose == batch.purpose
        and group is not None
        and event.step == batch.step_of(event.prompt)
        and 0 <= event.member < len(group.members)
    )


def settle(batch: RolloutBatch, event: AnswerEvent) -> RolloutBatch:
    """Return the same batch if the event comes late or again."""
    before = batch.groups[event.prompt]
    group = settle_in_group(before, event)
    if group is before:
        return batch
    settled = group.members[event.member].settled
    return msgspec.structs.replace(
        batch,
        groups={**batch.groups, event.prompt: group},
        unsettled=batch.unsettled - settled,
        complete=batch.complete + (settled and _counts(group, batch.differing)),
    )


def settle_in_group(group: Group, event: AnswerEvent) -> Group:
    """Return the same group if the event comes late or again."""
    members = group.members
    before = members[event.member]
    after = _settle(before, event)
    if after is before:
        return group
    return Group((*members[: event.member], after, *members[event.member + 1 :]))


def _settle(answer: Answer, event: AnswerEvent) -> Answer:
    finished, replace = answer.finished, msgspec.structs.replace
    if answer.settled:
        return answer
    match event:
        case RolloutFinished() if finished is None:
            return replace(
                answer,
                finished=event.attempt,
                length=event.length,
                truncated=event.stop == "length",
                prompt_length=event.prompt_length,
                ref=event.answer,
            )
        case RolloutScored() if finished in (None, event.attempt):
            if any(score.attempt == event.attempt for score in answer.scores):
                return answer
            score = Score(
                attempt=event.attempt,
                reward=event.reward,
                parts=event.parts,
                final=event.final,
                unpenalised=event.unpenalised,
                correct=event.correct,
                source=event.source,
                measured=event.measured,
            )
            return replace(answer, scores=(*answer.scores, score))
        case RolloutDropped() if finished is None:
            return replace(answer, dropped=True)
        case RolloutCut() if finished is None:
            if answer.cut is not None and answer.cut.attempt >= event.attempt:
                return answer
            cut = Cut(attempt=event.attempt, excused=event.excused, answer=event.answer)
            return replace(answer, cut=cut)
        case _:
            return answer
