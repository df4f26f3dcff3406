"""Describe a job in Python: the sections of a spec, with rows and functions instead of files."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import msgspec

from tlt.api.reward_functions import reward_section
from tlt.data.columns import find_column
from tlt.errors import ConfigError
from tlt.loggers.installed_check import refuse_missing
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import SourceSpec
from tlt.spec.spec_files import parse_job_spec, read_yaml, require_files

Section = Mapping[str, Any]
RewardLike = Callable[..., Any] | Section
_WHERE = "tlt.Job"


class Job:
    """A job to submit. Sections are those of a spec (docs/spec.md).

    `policy` may be a folder; `data["train"]`, `data["eval"]` and the `path` of an evaluation set or
    of a mixture's source may be lists of rows; `reward` may be a function, or a list of functions
    and sections. With `spec`, a YAML file, the sections change single keys of it, but for `reward`,
    which takes the place of the file's.
    """

    def __init__(
        self,
        spec: str | Path | None = None,
        *,
        policy: str | Path | Section | None = None,
        data: Section | None = None,
        reward: RewardLike | Sequence[RewardLike] | None = None,
        **sections: Any,
    ) -> None:
        if isinstance(policy, str | Path):
            policy = {"path": str(policy)}
        self._spec = None if spec is None else Path(spec)
        self._reward = reward
        given = {"policy": policy, "data": data} | sections
        self._sections = {key: value for key, value in given.items() if value is not None}

    def to_spec(self, folder: Path) -> JobSpec:
        """Return the spec; rows and functions are written to `folder`."""
        raw: dict[str, Any] = {} if self._spec is None else read_yaml(self._spec)
        base = Path.cwd() if self._spec is None else self._spec.resolve().parent
        for key, value in self._sections.items():
            before = raw.get(key)
            if isinstance(value, Mapping):
                changes = dict(cast("Section", value))
                raw[key] = {**before, **changes} if isinstance(before, dict) else changes
            else:
                raw[key] = value
        if self._reward is not None:
            raw["reward"] = _reward_sections(self._reward, folder)
        if isinstance(data := raw.get("data"), dict):
            raw["data"] = _with_files(cast("dict[str, Any]", data), folder)
        where = _WHERE if self._spec is None else str(self._spec)
        spec = parse_job_spec(raw, where=where, folder=base)
        require_files(spec, where)
        refuse_missing(spec.loggers, where)
        for warning in spec.warnings:
            warnings.warn(f"{where}: {warning}", stacklevel=3)
        return spec


def _reward_sections(reward: RewardLike | Sequence[RewardLike], folder: Path) -> Any:
    if isinstance(reward, list | tuple):
        return [_reward_sections(each, folder) for each in reward]
    if isinstance(reward, Mapping):
        return dict(reward)
    if not callable(reward):
        raise ConfigError(f"{_WHERE}: reward: neither a function nor a section: {reward!r}")
    return reward_section(reward, folder)


def _with_files(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write rows to files, those of a mixture's sources, too; the same rows have the same file."""
    written = dict(data)
    if (train := data.get("train")) is not None:
        written["train"] = _train_with_files(train, str(data.get("prompt_key", "prompt")), folder)
    held_out = data.get("eval")
    if isinstance(held_out, Mapping):
        sets = cast("Section", held_out)
        written["eval"] = {name: _set_with_file(name, each, folder) for name, each in sets.items()}
    elif held_out is not None:
        written["eval"] = _file_of(held_out, "eval", folder)
    return written


def _train_with_files(train: object, prompt_key: str, folder: Path) -> object:
    if not _is_mixture(train, prompt_key):
        return _file_of(train, "train", folder)
    return [{**source, "path": _file_of(source["path"], "train", folder)} for source in train]


def _is_mixture(given: object, prompt_key: str) -> TypeGuard[Sequence[Section]]:
    """Return True for a list of sources, each with its own `path`, instead of one of rows.

    A source with an unknown key is none of rows if it has no prompt.
    """
    if not isinstance(given, list | tuple) or not given:
        return False
    known = {field.name for field in msgspec.structs.fields(SourceSpec)}
    return all(
        isinstance(p, Mapping)
        and "path" in p
        and (known.issuperset(p) or find_column(p, prompt_key) is None)
        for p in given
    )


def _set_with_file(name: str, held_out: object, folder: Path) -> dict[str, Any]:
    if not isinstance(held_out, Mapping) or "path" not in held_out:
        raise ConfigError(f"{_WHERE}: data.eval.{name}: a set is a mapping with a path")
    held_out = cast("Section", held_out)
    return {**held_out, "path": _file_of(held_out["path"], f"eval.{name}", folder)}


def _file_of(rows: object, key: str, folder: Path) -> str:
    """Return a file or folder as it is named, and write rows to a file."""
    if isinstance(rows, str | Path):
        return str(rows)
    try:
        lines = [msgspec.json.encode(row) for row in cast("Iterable[Section]", rows)]
    except (TypeError, UnicodeError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{_WHERE}: data.{key}: a row isn't JSON: {error}") from error
    content = b"\n".join([*lines, b""])
    file = folder / f"{key}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    file.write_bytes(content)
    return str(file)
