"""List a spec's files of prompts, each with its columns and the keys that name them."""

from typing import NamedTuple

import msgspec

from tlt.spec.data_and_algorithm import DataSpec, EvaluationSet, SourceSpec
from tlt.spec.environment import EnvironmentSpec

Environment = EnvironmentSpec | msgspec.UnsetType


class Column(NamedTuple):
    """A column by its name, or by its path through mappings, and the key that names it."""

    name: str
    key: str


class PromptFile(NamedTuple):
    """A source or an evaluation set: its file or folder, and the columns of its rows."""

    name: str
    # of the spec, such as `data.train.1` or `data.eval.aime`
    key: str
    path: str
    prompt: Column
    answer: Column | None = None
    tools: Column | None = None
    # names a row's own source
    source: Column | None = None
    # has the tasks that `taskset:` stands for
    environment: Environment = msgspec.UNSET


def train_files(data: DataSpec, environment: Environment = msgspec.UNSET) -> tuple[PromptFile, ...]:
    files = (
        _file(data, source, source.label, f"data.train.{index}" if data.mixed else "data.train")
        for index, source in enumerate(data.sources)
    )
    return tuple(file._replace(environment=environment) for file in files)


def eval_files(data: DataSpec, environment: Environment = msgspec.UNSET) -> tuple[PromptFile, ...]:
    named = isinstance(data.eval, dict)
    files = (
        _file(data, held_out, name, f"data.eval.{name}" if named else "data.eval")
        for name, held_out in data.evaluation_sets.items()
    )
    return tuple(file._replace(environment=environment) for file in files)


def prompt_files(data: DataSpec) -> tuple[PromptFile, ...]:
    return (*train_files(data), *eval_files(data))


def names_in_rows(data: DataSpec) -> bool:
    """Return True if rows name their sources themselves."""
    return any(file.source is not None for file in prompt_files(data))


def _file(data: DataSpec, own: SourceSpec | EvaluationSet, name: str, place: str) -> PromptFile:
    def column(key: str) -> Column | None:
        for section, where in ((own, place), (data, "data")):
            if (value := getattr(section, key, None)) is not None:
                return Column(value, f"{where}.{key}")
        return None

    prompt = column("prompt_key")
    assert prompt is not None
    return PromptFile(
        name=name,
        key=place,
        path=own.path,
        prompt=prompt,
        answer=column("answer_key"),
        tools=column("tools_key"),
        source=column("source_key"),
    )
