"""A round of rollouts: every member of every group ends scored or dropped, exactly once."""

import msgspec

from tlt.config import JobSpec
from tlt.ids import Attempt, PromptIndex, Purpose, Step
from tlt.policies.keyed_random import permuted
from tlt.protocol.events import DecodingReported, RolloutDropped, RolloutFinished, RolloutScored


class Score(msgspec.Struct, frozen=True, array_like=True):
    attempt: Attempt
    reward: float


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What is known of one member; scores may come before the answer that one of them is for."""

    finished: Attempt | None = None
    length: int = 0
    scores: tuple[Score, ...] = ()
    dropped: bool = False

    @property
    def reward(self) -> float | None:
        """The score of the answer that counts, once both are here."""
        if self.dropped:
            return None
        return next((s.reward for s in self.scores if s.attempt == self.finished), None)

    @property
    def settled(self) -> bool:
        return self.dropped or self.reward is not None


class Group(msgspec.Struct, frozen=True, array_like=True):
    members: tuple[Answer, ...]


class RolloutBatch(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    groups: dict[PromptIndex, Group]
    unsettled: int
    # how often entries went back to the queue; a worker that idles says up to which it looked
    requeues: int = 0
    # that ranks decoded, as far as they told: one whose worker came back goes on from there
    seconds: dict[str, float] = {}

    @property
    def settled(self) -> bool:
        return self.unsettled == 0

    @property
    def longest(self) -> float | None:
        """What the rank decoded that decoded longest: without its start, which is long in a
        session's first round."""
        return max(self.seconds.values(), default=None)

    def rewards(self) -> list[float]:
        return [
            answer.reward
            for group in self.groups.values()
            for answer in group.members
            if answer.reward is not None
        ]


def step_prompts(spec: JobSpec, step: Step, train_prompts: int) -> tuple[PromptIndex, ...]:
    """In each epoch all of them, in another order."""
    size = spec.algorithm.prompts_per_step
    epoch, place = divmod(step, train_prompts // size)
    return tuple(
        PromptIndex(permuted(place * size + i, train_prompts, spec.seed, epoch))
        for i in range(size)
    )


def open_round(
    step: Step, purpose: Purpose, prompts: tuple[PromptIndex, ...], members: int
) -> RolloutBatch:
    blank = Group((Answer(),) * members)
    return RolloutBatch(
        step=step,
        purpose=purpose,
        groups=dict.fromkeys(prompts, blank),
        unsettled=len(prompts) * members,
    )


def told(round_: RolloutBatch, event: DecodingReported) -> RolloutBatch:
    """With what a rank has decoded of it since it last told."""
    if (event.step, event.purpose) != (round_.step, round_.purpose):
        return round_
    rank = f"{event.worker}.{event.rank}"
    seconds = round_.seconds.get(rank, 0.0) + sum(tally.seconds for tally in event.tallies)
    return msgspec.structs.replace(round_, seconds={**round_.seconds, rank: seconds})


def is_about(round_: RolloutBatch, event: RolloutFinished | RolloutScored | RolloutDropped) -> bool:
    group = round_.groups.get(event.prompt)
    return (
        event.step == round_.step
        and event.purpose == round_.purpose
        and group is not None
        and 0 <= event.member < len(group.members)
    )


def settle(
    round_: RolloutBatch, event: RolloutFinished | RolloutScored | RolloutDropped
) -> tuple[RolloutBatch, bool]:
    """The round after the event, and whether the event changed it."""
    before = round_.groups[event.prompt].members[event.member]
    if before.settled:
        return round_, False
    replace = msgspec.structs.replace
    match event:
        case RolloutFinished():
            if before.finished is not None:
                return round_, False
            after = replace(before, finished=event.attempt, length=event.length)
        case RolloutScored():
            if before.finished is not None and before.finished != event.attempt:
                return round_, False
            if any(score.attempt == event.attempt for score in before.scores):
                return round_, False
            score = Score(event.attempt, event.reward)
            after = replace(before, scores=(*before.scores, score))
        case RolloutDropped():
            if before.finished is not None:
                return round_, False
            after = replace(before, dropped=True)
    members = round_.groups[event.prompt].members
    group = Group((*members[: event.member], after, *members[event.member + 1 :]))
    return (
        replace(
            round_,
            groups={**round_.groups, event.prompt: group},
            unsettled=round_.unsettled - after.settled,
        ),
        True,
    )
