"""Read the prompts of a job's training sources and evaluation sets, and count what is odd."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tlt.data.columns import column_of, find_column, sources_of
from tlt.data.dataset import Prompt, question_of, rows
from tlt.models.tokenizer import Tokenizer
from tlt.report.statistics import quantile
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import DataSpec
from tlt.spec.prompt_files import PromptFile, eval_files, train_files


class PromptSource(NamedTuple):
    # of the spec, such as data.eval.math500
    key: str
    file: PromptFile
    data: DataSpec
    held_out: bool = False
    # prompts that a job takes; None for all
    limit: int | None = None


class SourcePrompt(NamedTuple):
    location: str
    # as the data has it, before the chat template
    text: str
    prompt: Prompt


class SetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one source or set, as far as a job reads them."""

    key: str
    rows: int
    # lengths of prompts
    p50: int
    p95: int
    longest: int
    # prompts that a job leaves out or refuses
    too_long: int
    # prompts that are there before, in the same set or in another training source
    repeated: int
    without_answer: int


def training_sources(spec: JobSpec) -> list[PromptSource]:
    """Return the sources of training prompts; a job that only evaluates has none."""
    data = spec.data
    return [
        PromptSource(f"data.train.{file.name}" if data.mixed else file.key, file, data)
        for file in (train_files(data, spec.environment) if spec.algorithm.steps else ())
    ]


def evaluation_sources(spec: JobSpec) -> list[PromptSource]:
    data, sets = spec.data, spec.data.evaluation_sets
    return [
        PromptSource(file.key, file, data, True, sets[file.name].limit or data.eval_limit)
        for file in eval_files(data, spec.environment)
    ]


def read_prompts(source: PromptSource, tokenizer: Tokenizer, most: int) -> Iterator[SourcePrompt]:
    """Yield all prompts up to the last that a job takes, those of more than `most` tokens too."""
    file, data, taken = source.file, source.data, 0
    for location, row in rows(file):
        found = column_of(row, file.prompt.name)
        tools = None if file.tools is None else find_column(row, file.tools.name)
        if data.mixed and not source.held_out:  # as in a job
            row = {**row, data.prompt_key: found, "source": file.name}
        prompt = Prompt(
            tokens=tokenizer.prompt_tokens(found, data, location, tools),
            row=row,
            answer=None if file.answer is None else find_column(row, file.answer.name),
            set=file.name if source.held_out else None,
            sources=sources_of(row, file, location),
        )
        yield SourcePrompt(location, question_of(prompt, data), prompt)
        taken += len(prompt.tokens) <= most
        if taken == source.limit:
            return


def is_empty(answer: Any) -> bool:
    """Return True for null, blank text and an empty list or mapping."""
    return answer is None or answer in ([], {}) or (isinstance(answer, str) and not answer.strip())


class EvenSample:
    """Keep at most `limit` prompts, spread evenly over as many as come."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._every = 1
        self._count = 0
        self._kept: list[SourcePrompt] = []

    def add(self, prompt: SourcePrompt) -> None:
        if self._count % self._every == 0:
            self._kept.append(prompt)
        self._count += 1
        if len(self._kept) >= 2 * self._limit:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def prompts(self) -> list[SourcePrompt]:
        count = min(self._limit, len(self._kept))
        return [self._kept[index * len(self._kept) // count] for index in range(count)]


class SetFold:
    """Count the prompts of a set; `seen` has those of the sets that it is one with."""

    def __init__(self, source: PromptSource, most: int, limit: int, seen: dict[int, str]) -> None:
        self.source = source
        # tokens of a prompt
        self.most = most
        # of the rows with an answer
        self.sample = EvenSample(limit)
        self._seen = seen
        self._lengths: list[int] = []
        self.too_long: list[str] = []
        # where a prompt is, and where it was before
        self.repeated: list[tuple[str, str]] = []
        self.without_answer: list[str] = []

    def add(self, prompt: SourcePrompt) -> bool:
        """Return True for the first prompt of its kind."""
        tokens = prompt.prompt.tokens
        self._lengths.append(len(tokens))
        if len(tokens) > self.most:
            self.too_long.append(prompt.location)
        if not is_empty(prompt.prompt.answer):
            self.sample.add(prompt)
        elif self.source.file.answer is not None:
            self.without_answer.append(prompt.location)
        before = self._seen.setdefault(hash(tokens), prompt.location)
        if before != prompt.location:
            self.repeated.append((prompt.location, before))
        return before == prompt.location

    def figures(self) -> SetFigures:
        ordered = sorted(self._lengths)
        return SetFigures(
            key=self.source.key,
            rows=len(ordered),
            p50=int(quantile(ordered, 0.5)),
            p95=int(quantile(ordered, 0.95)),
            longest=ordered[-1],
            too_long=len(self.too_long),
            repeated=len(self.repeated),
            without_answer=len(self.without_answer),
        )
