"""Prompts and answers of a run, found again in its journal by where they stand in it."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec

from tlt.config import JobSpec
from tlt.dashboard.answer_pieces import Pieces, Tokens
from tlt.dataset import Prompt, Prompts, prompts_file
from tlt.errors import JournalError
from tlt.ids import Member, PromptIndex, Purpose, Step, WorkerId
from tlt.protocol.events import AnyEvent, RolloutDropped, RolloutFinished, RolloutScored
from tlt.store.journal import FILE_NAME, Position, follow

_KEPT_GROUPS = 4096
_LISTED = 400

_Key = tuple[Step, Purpose, PromptIndex]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    answers: int
    mean: float | None
    low: float | None
    high: float | None
    longest: int


class AnswerView(msgspec.Struct, frozen=True, kw_only=True):
    member: Member
    reward: float | None
    error: str | None
    worker: WorkerId
    tokens: int
    seconds: float
    stop: str
    # the text in pieces, each with how its tokens came about
    pieces: Pieces
    # tokens by how they came about
    origins: dict[str, int]


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    question: str
    answer: str | None
    answers: tuple[AnswerView, ...]


class _Found:
    def __init__(self, position: Position, length: int) -> None:
        self.position = position
        self.length = length


class Group:
    def __init__(self) -> None:
        self.found: dict[Member, _Found] = {}
        self.rewards: dict[Member, tuple[float, str | None]] = {}


class Samples:
    """The newest groups; a later attempt at an answer takes the place of an earlier one."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._tokens = Tokens(Path(spec.policy.path))
        self._groups: OrderedDict[_Key, Group] = OrderedDict()

    def watch(self, event: AnyEvent, position: Position) -> None:
        match event:
            case RolloutFinished():
                self._group(event).found[event.member] = _Found(position, event.length)
            case RolloutScored():
                self._group(event).rewards[event.member] = event.reward, event.error
            case _:
                pass

    def _group(self, event: RolloutFinished | RolloutScored | RolloutDropped) -> Group:
        key = event.step, event.purpose, event.prompt
        if key not in self._groups:
            self._groups[key] = Group()
            if len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        return self._groups[key]

    def rounds(self) -> list[tuple[Step, Purpose]]:
        """Newest first."""
        return list(dict.fromkeys((step, purpose) for step, purpose, _ in reversed(self._groups)))

    def groups(self, step: Step, purpose: Purpose) -> list[GroupView]:
        found: list[GroupView] = []
        for (at, what, prompt), group in self._groups.items():
            if (at, what) != (step, purpose) or not group.found:
                continue
            rewards = [reward for reward, _ in group.rewards.values()]
            found.append(
                GroupView(
                    step=step,
                    purpose=purpose,
                    prompt=prompt,
                    answers=len(group.found),
                    mean=sum(rewards) / len(rewards) if rewards else None,
                    low=min(rewards, default=None),
                    high=max(rewards, default=None),
                    longest=max(some.length for some in group.found.values()),
                )
            )
            if len(found) == _LISTED:
                break
        return found

    def remembered(self, step: Step, purpose: Purpose, prompt: PromptIndex) -> Group | None:
        return self._groups.get((step, purpose, prompt))

    def sample(self, step: Step, purpose: Purpose, prompt: PromptIndex, group: Group) -> SampleView:
        """Takes a moment: the loop does not wait for it, and may learn of more answers."""
        question, answer = self._question(purpose, prompt)
        answers = [
            self._answer(member, some, group.rewards.get(member))
            for member, some in sorted(group.found.copy().items())
        ]
        return SampleView(
            step=step,
            purpose=purpose,
            prompt=prompt,
            question=question,
            answer=answer,
            answers=tuple(answers),
        )

    def _question(self, purpose: Purpose, prompt: PromptIndex) -> tuple[str, str | None]:
        try:
            row = _row(prompts_file(self._folder, purpose), prompt)
        except (OSError, IndexError, msgspec.DecodeError):
            return "", None  # the folder is not what it was while the job was at work
        asked = row.row.get(self._spec.data.prompt_key)
        return _spoken(asked), None if row.answer is None else str(row.answer)

    def _answer(
        self, member: Member, found: _Found, score: tuple[float, str | None] | None
    ) -> AnswerView:
        read = next(follow(self._folder / FILE_NAME, found.position), None)
        event = None if read is None else read[0].event
        if not isinstance(event, RolloutFinished):
            raise JournalError("an answer of this group was taken back; look again")
        origins: dict[str, int] = {}
        for span in event.origins:
            origins[span.origin] = origins.get(span.origin, 0) + span.tokens
        reward, error = score or (None, None)
        return AnswerView(
            member=member,
            reward=reward,
            error=error,
            worker=event.worker,
            tokens=event.length,
            seconds=event.decode_seconds,
            stop=event.stop,
            pieces=self._tokens.pieces(event),
            origins=origins,
        )


def _row(file: Path, prompt: PromptIndex) -> Prompt:
    prompts = Prompts(file)
    try:
        return prompts[prompt]
    finally:
        prompts.close()


def _spoken(asked: Any) -> str:
    """Plain text, or messages one after the other."""
    if isinstance(asked, list) and all(isinstance(turn, dict) for turn in asked):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in asked)
    return "" if asked is None else str(asked)
