"""Read specs from YAML, with `--set` overrides; an error names the key, and a similar one."""

import os
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tlt.errors import ConfigError
from tlt.spec.algorithm_presets import apply_preset
from tlt.spec.config import JobSpec, PolicySpec
from tlt.spec.data_and_algorithm import (
    HUB,
    AlgorithmSpec,
    DataSpec,
    EvaluationSet,
    SourceSpec,
    is_own_function,
    names_file,
)
from tlt.spec.environment import EnvironmentSpec
from tlt.spec.reward import RewardSpec, require_distinct
from tlt.spec.section import Section, holds_named_sections, section_of, suggestion

_BOOL = "tag:yaml.org,2002:bool"
_INDEX = re.compile(r"\[[^]]*\]")
_WRITTEN = {bool: ["true", "false"], int: ["a number"]}
_NO_SWITCH = re.compile(r"^(?:true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO)$")


class _Yaml(yaml.SafeLoader):
    """Read `1e-4` as a number, which PyYAML reads as text, and `mode: off` as a word."""


class _YamlOut(yaml.SafeDumper):
    """Quote text that _Yaml would read as a number."""


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, _NO_SWITCH if tag == _BOOL else pattern) for tag, pattern in resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _side in (_Yaml, _YamlOut):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def load_job_spec(path: Path, overrides: list[str] | None = None) -> JobSpec:
    """Read a YAML file; paths in it are relative to its folder."""
    return read_job_spec(_read_text(path), str(path), path.resolve().parent, overrides)


def load_rewards(path: Path, overrides: list[str] | None = None) -> tuple[RewardSpec, ...]:
    """Read the rewards of a YAML file, and nothing else of it."""
    raw = _parse_yaml(_read_text(path), str(path), overrides)
    part = {"reward": raw.get("reward")}
    _refuse_unknown_keys(part, _RewardsOnly, str(path), ())
    try:
        read = msgspec.convert(part, _RewardsOnly)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_readable(error, _RewardsOnly)}") from error
    found = reward_with_absolute_paths(read.reward, path.resolve().parent)
    return found if isinstance(found, tuple) else (found,)


class _RewardsOnly(Section, frozen=True, kw_only=True):
    reward: RewardSpec | tuple[RewardSpec, ...]

    def __post_init__(self) -> None:
        if isinstance(self.reward, tuple):
            require_distinct(self.reward)


def read_job_spec(
    text: str, where: str, folder: Path, overrides: list[str] | None = None
) -> JobSpec:
    """Read YAML text; paths in it are relative to `folder`."""
    return parse_job_spec(_parse_yaml(text, where, overrides), where=where, folder=folder)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error


def _parse_yaml(text: str, where: str, overrides: list[str] | None) -> dict[str, Any]:
    try:
        raw: Any = yaml.load(text, Loader=_Yaml)
    # a date that doesn't exist is a ValueError
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: a spec is a mapping with the sections policy, data, reward, …")
    for override in overrides or []:
        _override(raw, override)
    return raw


def parse_job_spec(raw: dict[str, Any], where: str, folder: Path) -> JobSpec:
    _refuse_unknown_keys(raw, JobSpec, where, ())
    apply_preset(raw, where)
    try:
        spec = msgspec.convert(raw, JobSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(error, JobSpec)}") from error
    spec = _with_absolute_paths(spec, folder)
    if spec.policy.revision is not None and spec.policy.hub_id is None:
        raise ConfigError(
            f"{where}: policy.revision: {spec.policy.path} is a folder, and only a policy of the "
            "Hub has revisions: leave it out"
        )
    return spec


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a spec's keys as they are written."""
    return _parse_yaml(_read_text(path), str(path), None)


def require_files(spec: JobSpec, where: str) -> None:
    """Check that what the spec names is there; the rest is checked when the job is prepared."""
    policy = spec.policy
    if policy.hub_id is None and not Path(policy.path).is_dir():
        raise ConfigError(
            f"{where}: policy.path: {policy.path}: no such folder; a policy of the Hub is org/name"
        )
    for key in ("loss", "advantage"):
        file = getattr(spec.algorithm, key).rpartition(":")[0]
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError(f"{where}: algorithm.{key}: {file}: no such file")
    for key, file in data_files(spec).items():
        if names_file(file) and not Path(file).exists():
            raise ConfigError(f"{where}: {key}: {file}: no such file or folder")
    for reward in spec.rewards:
        if reward.path is not None and not Path(reward.path).is_dir():
            raise ConfigError(f"{where}: reward.path: {reward.path}: no such folder")


def data_files(spec: JobSpec) -> dict[str, str]:
    """Return the files or folders that a job reads, by the key that names each."""
    data, files = spec.data, dict[str, str]()
    if spec.algorithm.steps:
        if isinstance(data.train, str):
            files["data.train"] = data.train
        else:
            files = {f"data.train.{n}.path": each.path for n, each in enumerate(data.train)}
    if isinstance(data.eval, str):
        return {**files, "data.eval": data.eval}
    sets = data.evaluation_sets
    return {**files, **{f"data.eval.{name}.path": each.path for name, each in sets.items()}}


def to_yaml(spec: JobSpec) -> str:
    return yaml.dump(msgspec.to_builtins(spec), Dumper=_YamlOut, sort_keys=False)


def _with_absolute_paths(spec: JobSpec, folder: Path) -> JobSpec:
    def absolute(path: str) -> str:
        return _absolute(path, folder)

    replace = msgspec.structs.replace
    return replace(
        spec,
        policy=replace_policy(spec.policy, spec.policy.path, folder),
        data=replace(
            spec.data,
            train=_absolute_sources(spec.data, folder),
            eval=_eval_with_absolute_paths(spec.data.eval, folder),
        ),
        reward=reward_with_absolute_paths(spec.reward, folder),
        environment=_environment_with_absolute_paths(spec, folder),
        algorithm=_algorithm_with_absolute_files(spec.algorithm, folder),
        drafter=replace(
            spec.drafter,
            path=None if spec.drafter.path is None else absolute(spec.drafter.path),
        ),
    )


def replace_policy(policy: PolicySpec, path: str, folder: Path) -> PolicySpec:
    """Name another policy: a folder that is there by its absolute path, else an id of the Hub."""
    named, local = msgspec.structs.replace(policy, path=path), _absolute(path, folder)
    if path.startswith(HUB) or (named.hub_id is not None and not Path(local).is_dir()):
        return named
    return msgspec.structs.replace(policy, path=local)


def _eval_with_absolute_paths(
    held_out: str | dict[str, EvaluationSet] | None, folder: Path
) -> str | dict[str, EvaluationSet] | None:
    match held_out:
        case None:
            return None
        case str():
            return _absolute_data(held_out, folder)
        case _:
            return {
                name: msgspec.structs.replace(each, path=_absolute_data(each.path, folder))
                for name, each in held_out.items()
            }


def _absolute_sources(data: DataSpec, folder: Path) -> str | tuple[SourceSpec, ...]:
    if isinstance(data.train, str):
        return _absolute_data(data.train, folder)
    return tuple(
        msgspec.structs.replace(source, path=_absolute_data(source.path, folder))
        for source in data.train
    )


def _absolute_data(path: str, folder: Path) -> str:
    return _absolute(path, folder) if names_file(path) else path


def reward_with_absolute_paths(
    reward: RewardSpec | tuple[RewardSpec, ...], folder: Path
) -> RewardSpec | tuple[RewardSpec, ...]:
    """Name files from where a reward's process can find them: it runs elsewhere."""
    if isinstance(reward, tuple):
        return tuple(_with_absolute_files(each, folder) for each in reward)
    return _with_absolute_files(reward, folder)


def _with_absolute_files(reward: RewardSpec, folder: Path) -> RewardSpec:
    function = None if reward.function is None else _absolute_function(reward.function, folder)
    writable = tuple(_absolute(path, folder) for path in reward.writable)
    model = None if reward.path is None else _absolute(reward.path, folder)
    return msgspec.structs.replace(reward, function=function, writable=writable, path=model)


def _environment_with_absolute_paths(
    spec: JobSpec, folder: Path
) -> EnvironmentSpec | msgspec.UnsetType:
    if not spec.environment:
        return msgspec.UNSET
    factory = spec.environment.factory
    return msgspec.structs.replace(
        spec.environment,
        factory=None if factory is None else _absolute_function(factory, folder),
        command=tuple(_absolute_if_file(part, folder) for part in spec.environment.command),
        writable=tuple(_absolute(path, folder) for path in spec.environment.writable),
        python=_absolute_program(spec.environment.python, folder),
    )


def _absolute_program(program: str | None, folder: Path) -> str | None:
    """Keep links, by which an interpreter knows its packages, and names that PATH has."""
    if program is None or "/" not in program:
        return program
    try:
        return os.path.abspath(folder / Path(program).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"environment.python: {program}: {error}") from error


def _absolute_if_file(part: str, folder: Path) -> str:
    """Name a file beside the spec from where a program can find it."""
    return _absolute(part, folder) if (folder / part).is_file() else part


def _absolute_function(function: str, folder: Path) -> str:
    """Name a module beside the spec by its file."""
    module, _, name = function.rpartition(":")
    file = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    if module.endswith(".py") or (folder / file).is_file():
        return f"{_absolute(file, folder)}:{name}"
    return function


def _algorithm_with_absolute_files(algorithm: AlgorithmSpec, folder: Path) -> AlgorithmSpec:
    def absolute(name: str) -> str:
        return _absolute_function(name, folder) if is_own_function(name) else name

    return msgspec.structs.replace(
        algorithm, loss=absolute(algorithm.loss), advantage=absolute(algorithm.advantage)
    )


def _absolute(path: str, folder: Path) -> str:
    try:
        return str((folder / Path(path).expanduser()).resolve())
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{path!r} is no path: {error}") from error


def _override(raw: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"--set {override}: write --set section.key=value")
    *sections, last = key.strip().split(".")
    target = raw
    for section in sections:
        if isinstance(target, list):
            target = _element(target, section, override)
        else:
            target = target.setdefault(section, {})
        if not isinstance(target, dict | list):
            raise ConfigError(f"--set {override}: {section} is not a section")
    if isinstance(target, list):
        raise ConfigError(f"--set {override}: name a key of one of the list")
    try:
        target[last] = yaml.load(value, Loader=_Yaml)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--set {override}: {_one_line(error)}") from error


def _element(several: list[Any], index: str, override: str) -> Any:
    if not index.isdigit() or int(index) >= len(several):
        raise ConfigError(f"--set {override}: {index} is none of 0 to {len(several) - 1}")
    return several[int(index)]


def _refuse_unknown_keys(
    raw: dict[str, Any], section: type[Section], where: str, path: tuple[str, ...]
) -> None:
    hints = typing.get_type_hints(section)
    for key, value in raw.items():
        dotted = ".".join((*path, str(key)))
        if key not in hints:
            raise ConfigError(f"{where}: {dotted}: unknown key; {suggestion(str(key), hints)}")
        nested = section_of(hints[key])
        if nested is None:
            continue
        several: dict[str, Any] = {key: value}
        named = isinstance(value, dict) and holds_named_sections(hints[key])
        if isinstance(value, list):
            several = {f"{key}.{index}": each for index, each in enumerate(value)}
        elif named:
            given = typing.cast("dict[str, Any]", value)
            several = {f"{key}.{name}": each for name, each in given.items()}
        for name, each in several.items():
            if isinstance(each, dict):
                given = typing.cast("dict[str, Any]", each)
                _refuse_unknown_keys(given, nested, where, (*path, name))
            if named:
                _refuse_invalid(each, nested, f"{where}: {'.'.join((*path, name))}")


def _refuse_invalid(raw: object, section: type[Section], where: str) -> None:
    """Check a section on its own, because an error within a mapping doesn't tell its key."""
    try:
        msgspec.convert(raw, section)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_readable(error, section)}") from error


def _readable(error: msgspec.ValidationError, section: type[Section]) -> str:
    complaint, separator, path = str(error).rpartition(" - at `$")
    if not separator:
        return str(error)
    dotted = path.rstrip("`").lstrip(".")
    if unknown := re.fullmatch(r"Invalid enum value '(.*)'", complaint, re.DOTALL):
        known = _known_texts(section, _INDEX.sub("", dotted).split("."))
        listed, near = f"known: {', '.join(known)}", suggestion(unknown[1], known)
        complaint = "; ".join(dict.fromkeys((complaint, listed, near)))
    return f"{dotted}: {complaint}" if dotted else complaint


def _known_texts(kind: Any, keys: list[str]) -> list[str]:
    """Return what may be written for a key of a section whose type has a Literal of texts."""
    for key in keys:
        kind = typing.get_type_hints(section_of(kind) or Section).get(key)
    if kind in _WRITTEN:
        return _WRITTEN[kind]
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [text for each in typing.get_args(kind) for text in _known_texts(each, [])]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
