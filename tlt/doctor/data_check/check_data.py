"""Check all data of a job: held-out prompts first, then the training prompts beside them."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tlt.data.dataset import Prompt, rows
from tlt.data.prompt_sorting import sort_prompts
from tlt.data.source_check import check_sources
from tlt.doctor.data_check.data_findings import (
    find_in_gold,
    find_in_set,
    find_leaks,
    no_answers,
    no_reward,
    not_called,
    refused,
)
from tlt.doctor.data_check.gold_rewards import GoldFigures, score_gold
from tlt.doctor.data_check.leakage import ComparedPrompt, HeldOutPrompts
from tlt.doctor.data_check.prompt_sets import (
    SetFigures,
    SetFold,
    evaluation_sources,
    read_prompts,
    training_sources,
)
from tlt.doctor.findings import Finding
from tlt.errors import ConfigError, DataError
from tlt.models.config_json import read_config
from tlt.models.hub_cache import find_hub_policy
from tlt.models.tokenizer import Tokenizer
from tlt.spec.config import JobSpec
from tlt.spec.reward import RewardSpec

# kinds that cost money or load a model
_CALLED_IF_ASKED = ("url", "model")


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    sets: tuple[SetFigures, ...]
    gold: tuple[GoldFigures, ...]
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == "wrong"]


class _DataRead(NamedTuple):
    trained: list[SetFold]
    held_out: list[tuple[SetFold, HeldOutPrompts]]

    @property
    def folds(self) -> list[SetFold]:
        return [*self.trained, *(fold for fold, _ in self.held_out)]


def check_data(spec: JobSpec, limit: int, all_rewards: bool) -> DataReport:
    """Score the gold of at most `limit` rows of each set; read no weights of the policy."""
    hub_policy = find_hub_policy(spec.policy, weights=False)
    spec = spec if hub_policy is None else hub_policy.with_folder(spec)
    tokenizer = Tokenizer(spec.policy.path)
    read = _read_data(spec, tokenizer, limit)
    has_gold = any(fold.source.file.answer is not None for fold in read.folds)
    asked = [
        reward
        for reward in spec.rewards
        if reward.kind != "environment" and (all_rewards or reward.kind not in _CALLED_IF_ASKED)
    ]
    gold = asyncio.run(_score(asked, read.folds, tokenizer)) if has_gold else []
    return DataReport(
        sets=tuple(fold.figures() for fold in read.folds),
        gold=tuple(figures for _, figures in gold),
        findings=(
            *_find_refusals(spec, read.trained),
            *_find_in_sets(read, spec.data.long_prompts == "refuse"),
            *_find_in_rewards(gold, len(asked) == len(spec.rewards)),
            *(not_called(reward) for reward in spec.rewards if reward not in asked),
            *(() if has_gold else (no_answers(),)),
        ),
    )


def _read_data(spec: JobSpec, tokenizer: Tokenizer, limit: int) -> _DataRead:
    """Read every set once, and compare training prompts with held-out ones."""
    most = spec.data.most_prompt_tokens(_context(spec))
    read, seen = _DataRead([], []), dict[int, str]()
    for source in evaluation_sources(spec):
        fold, prompts = SetFold(source, most, limit, {}), list[ComparedPrompt]()
        for prompt in read_prompts(source, tokenizer, most):
            fold.add(prompt)
            prompts.append(ComparedPrompt(prompt))
        read.held_out.append((fold, HeldOutPrompts(source.key, prompts)))
    for source in training_sources(spec):
        fold = SetFold(source, most, limit, seen)
        for prompt in read_prompts(source, tokenizer, most):
            if fold.add(prompt) and read.held_out:
                trained = ComparedPrompt(prompt)
                for _, held_out in read.held_out:
                    held_out.compare(trained)
        read.trained.append(fold)
    return read


def _context(spec: JobSpec) -> int:
    positions = read_config(Path(spec.policy.path)).max_positions
    return min(positions, spec.policy.max_context or positions)


async def _score(
    rewards: Sequence[RewardSpec], folds: Sequence[SetFold], tokenizer: Tokenizer
) -> list[tuple[RewardSpec, GoldFigures]]:
    samples = [(fold.source, fold.sample.prompts()) for fold in folds]
    return [
        (reward, figures)
        for reward in rewards
        for figures in await score_gold(reward, samples, tokenizer)
    ]


def _find_refusals(spec: JobSpec, trained: Sequence[SetFold]) -> Iterator[Finding]:
    """Check sources and the order of training prompts as a job's preparation does."""
    try:
        check_sources(spec)
    except ConfigError as error:
        yield refused("sources", error)
    for fold in trained if spec.data.order_by is not None else ():
        try:
            _sort(fold, spec.data.order_by or "")
        except DataError as error:
            yield refused(f"order of {fold.source.key}", error)


def _sort(fold: SetFold, column: str) -> None:
    """Sort the rows as they are in the file, without those that a job leaves out."""
    path, left_out = fold.source.file.path, set(fold.too_long)
    kept = (row for location, row in rows(fold.source.file) if location not in left_out)
    sort_prompts((Prompt(tokens=(), row=row) for row in kept), path, column)


def _find_in_sets(read: _DataRead, refuses_long: bool) -> Iterator[Finding]:
    for fold in read.folds:
        yield from find_in_set(fold, refuses_long)
    for fold, held_out in read.held_out if read.trained else ():
        yield from find_leaks(held_out, fold.figures().rows)


def _find_in_rewards(
    gold: Sequence[tuple[RewardSpec, GoldFigures]], all_called: bool
) -> Iterator[Finding]:
    alone = all(reward.least_correct is None for reward, _ in gold)
    for reward, figures in gold:
        if figures.sampled:
            yield find_in_gold(reward, figures, alone)
    applied = {figures.key for _, figures in gold if figures.rows}
    sampled = {figures.key: figures.sampled for _, figures in gold if figures.sampled}
    for key, count in sampled.items():
        if all_called and key not in applied:
            yield no_reward(key, count)
