"""Read the answers of a run with their prompts and rewards."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tlt.base.id_types import Member, PromptIndex, Purpose, Step
from tlt.blobs.answer_files import Answer, AnswerFiles, Turn
from tlt.data.dataset import Prompts, prompts_file, question_of
from tlt.errors import BlobLost
from tlt.protocol.events import RolloutFinished, RolloutScored
from tlt.runs.run_folder_reader import journal_entries, read_spec


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    purpose: Purpose
    # of a held-out prompt
    set: str | None
    prompt: PromptIndex
    member: Member
    question: str
    # the row's answer
    right: str | None
    # None if the run's folder no longer has it; of several turns the policy's last one
    text: str | None
    # all messages, where an environment has a part in the answer
    turns: tuple[Turn, ...] = ()
    # other conversations that an agent has held in it
    branches: tuple[tuple[Turn, ...], ...] = ()
    # None if it was not scored, or is left out
    reward: float | None
    # what it says in the end, as far as the verifier of a held-out answer looks for that
    final: str | None
    error: str | None
    tokens: int
    stop: str


def read_answers(
    run: Path, purpose: Purpose, step: Step | None = None, only: str | None = None
) -> Iterator[AnswerRow]:
    """Yield the answers of a step, by default the last one that has any, prompt by prompt.

    `only` names an evaluation set.
    """
    spec, batches = read_spec(run), _fold(run, purpose)
    chosen = max(batches, default=None) if step is None else step
    if chosen is None or chosen not in batches:
        return
    prompts, files = Prompts(prompts_file(run, purpose)), AnswerFiles(run)
    try:
        for (index, member), (event, score) in sorted(batches[chosen].items()):
            prompt = prompts[index]
            if only in (None, prompt.set):
                answer = _read(files, event)
                yield AnswerRow(
                    step=chosen,
                    purpose=purpose,
                    set=prompt.set,
                    prompt=index,
                    member=member,
                    question=question_of(prompt, spec.data),
                    right=None if prompt.answer is None else str(prompt.answer),
                    text=None if answer is None else answer.text,
                    turns=() if answer is None else answer.turns,
                    branches=() if answer is None else tuple(b.turns for b in answer.branches),
                    reward=None if score is None else score.reward,
                    final=None if score is None else score.final,
                    error=None if score is None else score.error,
                    tokens=event.length,
                    stop=event.stop,
                )
    finally:
        prompts.close()


_Batch = dict[tuple[PromptIndex, Member], tuple[RolloutFinished, RolloutScored | None]]


def _fold(run: Path, purpose: Purpose) -> dict[Step, _Batch]:
    """Return the answers by step; a later attempt replaces an earlier one."""
    batches: dict[Step, _Batch] = {}
    scores: dict[tuple[Step, PromptIndex, Member], RolloutScored] = {}
    for entry in journal_entries(run):
        event = entry.event
        match event:
            case RolloutFinished() if event.purpose == purpose:
                found = scores.get((event.step, event.prompt, event.member))
                batch = batches.setdefault(event.step, {})
                batch[event.prompt, event.member] = event, found
            case RolloutScored() if event.purpose == purpose:
                scores[event.step, event.prompt, event.member] = event
                batch = batches.get(event.step, {})
                if answer := batch.get((event.prompt, event.member)):
                    batch[event.prompt, event.member] = answer[0], event
            case _:
                pass
    return batches


def _read(files: AnswerFiles, event: RolloutFinished) -> Answer | None:
    try:
        return files.read(event.answer)
    except BlobLost:
        return None
