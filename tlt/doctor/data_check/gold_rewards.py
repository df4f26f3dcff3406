"""Score the gold of a data set with each reward: what gives nothing to it teaches nothing.

The gold is tried as it is and in the forms that answers have; the best of them counts.
"""

import asyncio
import contextlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tlt.data.dataset import Prompt, conversation, prompt_of
from tlt.doctor.data_check.prompt_sets import PromptSource, SourcePrompt
from tlt.models.tokenizer import Tokenizer
from tlt.rewards.kinds.code_tests import complain_of_tests
from tlt.rewards.process.weighted_rewards import Verdict, WeightedRewards
from tlt.spec.reward import RewardSpec

AS_IT_IS = "as it is"
# of rows that have tests and no program
TESTS_PARSE = "tests that parse"
# columns in which data sets have programs that pass the tests
_SOLUTIONS = ("solution", "code", "canonical_solution", "solutions")
# that functions may look for
_OTHER_FORMS = ("#### gold", "Answer: gold", "<answer>gold</answer>")


class GoldFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards that the gold of one set gets from one reward."""

    key: str
    reward: str
    # rows that were scored, and those to which it applies
    sampled: int
    rows: int
    # those that it calls right, and those with a reward above 0
    right: int
    positive: int
    # the first of the others
    less: str | None
    # the highest reward; None where nothing was scored
    highest: float | None
    # the form that was right most often or, where none was, did best
    form: str | None
    # rows in which every form failed, and the first failure
    failed: int
    error: str | None


class _Best(NamedTuple):
    """The best reward of a row's forms; the first error where none was scored."""

    location: str
    reward: float | None = None
    right: bool = False
    form: str | None = None
    error: str | None = None


def gold_answers(reward: RewardSpec, prompt: SourcePrompt) -> dict[str, str]:
    """Return answers that say the gold, by the name of their form."""
    if reward.kind == "code":
        return dict(_programs(prompt))
    answer = prompt.prompt.answer
    gold = answer[0] if isinstance(answer, list) else answer
    gold = gold if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)
    boxed = {r"\boxed{gold}": rf"\boxed{{{gold}}}"}
    marked = {f"{reward.marker}gold": f"{reward.marker}{gold}"}
    # no model's final answer has the lines of a whole solution
    several_lines = "\n" in gold.strip()
    match reward.kind:
        case "boxed":
            others = {} if several_lines else boxed
        case "final_answer":
            others = {} if several_lines else marked
        case "numeric":
            others = {}
        case "math":
            others = boxed
        case _:
            others = boxed | marked | {form: form.replace("gold", gold) for form in _OTHER_FORMS}
    return {AS_IT_IS: gold} | others


def _programs(prompt: SourcePrompt) -> dict[str, str]:
    """Return the programs of the first column that holds some."""
    column = next((name for name in _SOLUTIONS if prompt.prompt.row.get(name)), None)
    found = None if column is None else prompt.prompt.row[column]
    if isinstance(found, str) and found.lstrip().startswith("["):
        with contextlib.suppress(ValueError):
            found = json.loads(found)
    program = found[0] if isinstance(found, list) and found else found
    if column is None or not isinstance(program, str):
        return {}
    # HumanEval's go on where the prompt ends
    return {column: program, f"prompt and {column}": prompt.text + program}


async def score_gold(
    reward: RewardSpec,
    samples: Sequence[tuple[PromptSource, Sequence[SourcePrompt]]],
    tokenizer: Tokenizer,
) -> list[GoldFigures]:
    """Score each sample in the processes that a job has for this reward."""
    # the weight isn't part of what it says
    alone = msgspec.structs.replace(reward, weight=1.0).on_device("cpu")
    scorer = _GoldScorer(WeightedRewards([alone], Path(os.devnull)), alone, tokenizer)
    try:
        await scorer.rewards.start()
        return [await scorer.figures(source, prompts) for source, prompts in samples]
    finally:
        await scorer.rewards.stop()


class _GoldScorer:
    def __init__(self, rewards: WeightedRewards, reward: RewardSpec, tokenizer: Tokenizer) -> None:
        self.rewards = rewards
        self._reward = reward
        self._tokenizer = tokenizer

    async def figures(self, source: PromptSource, prompts: Sequence[SourcePrompt]) -> GoldFigures:
        best = await asyncio.gather(*(self._best(source, prompt) for prompt in prompts))
        applied = [one for one in best if one.reward is not None or one.error is not None]
        rewards = [one.reward for one in applied if one.reward is not None]
        right = [one for one in applied if one.right]
        forms = Counter(one.form for one in right or applied)
        errors = [f"{one.location}: {one.error}" for one in applied if one.reward is None]
        return GoldFigures(
            key=source.key,
            reward=self._reward.label,
            sampled=len(best),
            rows=len(applied),
            right=len(right),
            positive=sum(reward > 0 for reward in rewards),
            less=next((one.location for one in applied if not one.right), None),
            highest=max(rewards, default=None),
            form=forms.most_common(1)[0][0] if forms else None,
            failed=len(errors),
            error=next(iter(errors), None),
        )

    async def _best(self, source: PromptSource, prompt: SourcePrompt) -> _Best:
        """Try one form after the other until one is right."""
        best, answers = _Best(prompt.location), gold_answers(self._reward, prompt)
        if self._reward.kind == "code" and self._reward.applies_to(prompt.prompt.sources):
            complaint = complain_of_tests(prompt.prompt.answer, prompt.prompt.row)
            if complaint is not None:
                return best._replace(error=complaint)
            if not answers:
                return best._replace(reward=1.0, right=True, form=TESTS_PARSE)
        for form, answer in answers.items():
            verdict = await self._score(source, prompt.prompt, answer)
            if verdict.error is not None:
                best = best._replace(error=best.error or verdict.error)
            elif verdict.reward is not None and (
                best.reward is None or verdict.reward > best.reward
            ):
                right = verdict.correct is True
                best = best._replace(reward=verdict.reward, right=right, form=form)
            if best.right or (best.error is not None and self._reward.kind == "url"):
                break  # a judge that doesn't answer is as slow for every form
        return best

    async def _score(self, source: PromptSource, prompt: Prompt, answer: str) -> Verdict:
        known: dict[str, Any] = {
            "tokens": lambda: self._tokenizer.answer_tokens(answer),
            "length": lambda: len(self._tokenizer.answer_tokens(answer)),
            "stop": lambda: "stop",
            "in_thought": lambda: False,
            "prompt": lambda: conversation(prompt_of(prompt, source.data), source.data),
        }
        return await self.rewards.score(
            answer, prompt.answer, prompt.row, known, sources=prompt.sources
        )
