"""Prompts and answers of a run; memory holds only the places of the answers."""

from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import msgspec

from tlt.base.id_types import Member, PromptIndex, Purpose, Step, WorkerId
from tlt.blobs.answer_files import AnswerFiles, Turn
from tlt.dashboard.answer_pieces import PieceDecoder, Pieces
from tlt.data.dataset import Prompt, Prompts, prompts_file, question_of
from tlt.errors import BlobLost
from tlt.protocol.commands import StartJob
from tlt.protocol.events import AnyEvent, RolloutFinished, RolloutScored
from tlt.spec.config import JobSpec

_KEPT_GROUPS = 4096
_LISTED_GROUPS = 400
_DELETED = "(the text is no longer in the run's folder)"

GroupKey = tuple[Step, Purpose, PromptIndex]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    # of a held-out prompt
    set: str | None
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
    pieces: Pieces
    # token counts by origin
    origins: dict[str, int]
    # where an environment has a part in it: all messages, of each conversation
    conversations: tuple[tuple[Turn, ...], ...] = ()


class SampleView(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    question: str
    answer: str | None
    answers: tuple[AnswerView, ...]


class _Score(NamedTuple):
    reward: float | None = None
    error: str | None = None


class Group:
    """Answers and scores by member; a later attempt replaces an earlier one."""

    def __init__(self) -> None:
        self.answers: dict[Member, RolloutFinished] = {}
        self.scores: dict[Member, _Score] = {}


class Samples:
    """The newest groups of a run."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self._folder = folder
        self._answers = AnswerFiles(folder)
        self._spec = spec
        self._decoder = PieceDecoder(Path(spec.policy.path))
        self._groups: OrderedDict[GroupKey, Group] = OrderedDict()
        # the evaluation set of each held-out prompt
        self._sets: list[str] = []

    def add(self, event: AnyEvent) -> None:
        match event:
            case StartJob():
                # a policy of the Hub has its folder since then
                self._decoder = PieceDecoder(Path(event.spec.policy.path))
                self._sets = [
                    each.name for each in event.prepared.eval_sets for _ in range(each.prompts)
                ]
            case RolloutFinished():
                self._group(event).answers[event.member] = event
            case RolloutScored():
                self._group(event).scores[event.member] = _Score(event.reward, event.error)
            case _:
                pass

    def _group(self, event: RolloutFinished | RolloutScored) -> Group:
        key = event.step, event.purpose, event.prompt
        if key not in self._groups:
            self._groups[key] = Group()
            if len(self._groups) > _KEPT_GROUPS:
                self._groups.popitem(last=False)
        return self._groups[key]

    def batches(self) -> list[tuple[Step, Purpose]]:
        """Return the rollout batches that have groups, newest first."""
        return list(dict.fromkeys((step, purpose) for step, purpose, _ in reversed(self._groups)))

    def groups(self, step: Step, purpose: Purpose) -> list[GroupView]:
        found = [
            _group_view(key, group, self._set_of(key))
            for key, group in self._groups.items()
            if key[:2] == (step, purpose) and group.answers
        ]
        return found[:_LISTED_GROUPS]

    def _set_of(self, key: GroupKey) -> str | None:
        _, purpose, prompt = key
        return self._sets[prompt] if purpose == "eval" and prompt < len(self._sets) else None

    def group(self, key: GroupKey) -> Group | None:
        return self._groups.get(key)

    def sample(self, key: GroupKey, group: Group) -> SampleView:
        """Read and decode the group's answers; this takes a moment and runs in a thread."""
        step, purpose, prompt = key
        question, answer = self._question(purpose, prompt)
        return SampleView(
            step=step,
            purpose=purpose,
            prompt=prompt,
            question=question,
            answer=answer,
            # the event loop may add answers meanwhile
            answers=tuple(
                self._answer(member, found, group.scores.get(member, _Score()))
                for member, found in sorted(group.answers.copy().items())
            ),
        )

    def _question(self, purpose: Purpose, prompt: PromptIndex) -> tuple[str, str | None]:
        try:
            row = _read_prompt(prompts_file(self._folder, purpose), prompt)
        except (OSError, IndexError, msgspec.DecodeError):
            return "", None  # the folder has changed since the job ran
        return question_of(row, self._spec.data), None if row.answer is None else str(row.answer)

    def _answer(self, member: Member, event: RolloutFinished, score: _Score) -> AnswerView:
        pieces: Pieces
        origins: dict[str, int] = {}
        conversations: tuple[tuple[Turn, ...], ...] = ()
        try:
            answer = self._answers.read(event.answer)
        except BlobLost:
            pieces = (("", _DELETED),)
        else:
            pieces = self._decoder.pieces(answer)
            if answer.turns:
                conversations = (answer.turns, *(branch.turns for branch in answer.branches))
            for span in answer.origins:
                origins[span.origin] = origins.get(span.origin, 0) + span.tokens
        return AnswerView(
            member=member,
            reward=score.reward,
            error=score.error,
            worker=event.worker,
            tokens=event.length,
            seconds=event.decode_seconds,
            stop=event.stop,
            pieces=pieces,
            origins=origins,
            conversations=conversations,
        )


def _group_view(key: GroupKey, group: Group, held_out: str | None) -> GroupView:
    step, purpose, prompt = key
    rewards = [score.reward for score in group.scores.values() if score.reward is not None]
    return GroupView(
        step=step,
        purpose=purpose,
        set=held_out,
        prompt=prompt,
        answers=len(group.answers),
        mean=sum(rewards) / len(rewards) if rewards else None,
        low=min(rewards, default=None),
        high=max(rewards, default=None),
        longest=max(answer.length for answer in group.answers.values()),
    )


def _read_prompt(file: Path, prompt: PromptIndex) -> Prompt:
    prompts = Prompts(file)
    try:
        return prompts[prompt]
    finally:
        prompts.close()
