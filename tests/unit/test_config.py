"""A spec is valid or is refused in one line that says where and why."""

import copy
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import SPEC, specs
from tlt.base.strategies import Draft, Ngram, Off
from tlt.errors import ConfigError
from tlt.spec.config import JobSpec, LoraSpec
from tlt.spec.spec_files import load_job_spec, parse_job_spec, read_job_spec, to_yaml

RAW: dict[str, Any] = {
    "policy": {"path": "model"},
    "data": {"train": "train.jsonl"},
    "reward": {"kind": "numeric"},
    "algorithm": {"steps": 1, "prompts_per_step": 2, "group_size": 2},
}


def parse(**changes: Any) -> JobSpec:
    """Parse RAW with these `section__key=value` overrides."""
    raw = copy.deepcopy(RAW)
    for dotted, value in changes.items():
        *sections, last = dotted.split("__")
        mapping = raw
        for section in sections:
            mapping = mapping.setdefault(section, {})
        mapping[last] = value
    return parse_job_spec(raw, "job.yaml", Path("/specs"))


def load(folder: Path, text: str, *overrides: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(text)
    return load_job_spec(path, list(overrides))


def test_fills_in_defaults() -> None:
    spec = parse()
    assert (spec.name, spec.seed, spec.rollout.temperature) == ("job", 0, 1.0)
    assert not spec.rollout.filtered


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"polcy": {}}, "polcy: unknown key; did you mean 'policy'?"),
        (
            {"algorithm__learning_rat": 1},
            "algorithm.learning_rat: unknown key; did you mean 'learning_rate'?",
        ),
        (
            {"policy__zzz": 1},
            "policy.zzz: unknown key; known: path, revision, max_context, dtype",
        ),
        (
            {"policy__lora": {"rnak": 8}},
            "policy.lora.rnak: unknown key; did you mean 'rank'?",
        ),
        ({"1": {}}, "1: unknown key; known: name, policy, data, reward"),
    ],
)
def test_refuses_unknown_key_and_names_its_near_miss(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**changes)
    assert str(error.value).startswith(f"job.yaml: {line}")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"policy": 5}, "policy: Expected `object`, got `int`"),
        ({"policy": {}}, "policy: Object missing required field `path`"),
        ({"name": 5}, "name: Expected `str`, got `int`"),
        ({"algorithm__steps": "many"}, "algorithm.steps: Expected `int`, got `str`"),
        ({"algorithm__steps": 1.5}, "algorithm.steps: Expected `int`, got `float`"),
        (
            {"loggers": ["tensorbord"]},
            "loggers: no logger 'tensorbord'; known: tensorboard, wandb, trackio, opentelemetry",
        ),
        ({"loggers": ["wandb", "wandb"]}, "loggers: one is named twice"),
        ({"rollout__stop": "x"}, "rollout.stop: Expected `array`, got `str`"),
        ({"rollout__stop": ["x", 3]}, "rollout.stop[1]: Expected `str`, got `int`"),
        ({"algorithm__betas": [0.9]}, "algorithm.betas: Expected `array` of length 2, got 1"),
    ],
)
def test_refuses_wrong_type_and_names_the_key(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**changes)
    assert str(error.value) == f"job.yaml: {line}"


def test_refuses_missing_section() -> None:
    raw = {key: value for key, value in RAW.items() if key != "reward"}
    with pytest.raises(ConfigError, match=r"job.yaml: Object missing required field `reward`"):
        parse_job_spec(raw, "job.yaml", Path("/"))


BOUNDS: list[tuple[str, Any, str]] = [
    ("policy__max_context", 0, "max_context must be above 0"),
    ("data__eval_limit", 0, "eval_limit must be above 0"),
    ("reward__timeout_seconds", 0, "timeout_seconds must be above 0"),
    ("reward__kind", "regex", "kind regex needs a pattern"),
    ("reward__kind", "function", "kind function needs function: package.module:name"),
    ("reward__marker", "", "marker must not be empty"),
    ("reward__tolerance", -1, "tolerance must be 0 or more"),
    ("reward__on_error", float("nan"), "on_error must lie within"),
    ("algorithm__steps", -1, "steps must be 0 (only evaluate) or more"),
    ("algorithm__keep_best_confidence", 1.0, "keep_best_confidence must lie in [0.5, 1)"),
    ("algorithm__prompts_per_step", 0, "prompts_per_step must be at least 1"),
    ("algorithm__group_size", 1, "group_size must be at least 2: answers are compared"),
    ("algorithm__learning_rate", 0, "learning_rate must be above 0"),
    ("algorithm__learning_rate", float("nan"), "learning_rate must be above 0"),
    ("algorithm__minibatches", 0, "minibatches must be at least 1"),
    ("algorithm__checkpoint_every", 0, "checkpoint_every must be at least 1"),
    ("algorithm__eval_every", -1, "eval_every must be 0 (never) or more"),
    ("algorithm__importance_cap", 0.5, "importance_cap must be at least 1"),
    ("algorithm__microbatch_tokens", 0, "microbatch_tokens must be at least 1"),
    ("algorithm__kl_coefficient", -1, "kl_coefficient must be 0 or more"),
    ("algorithm__warmup_steps", -1, "warmup_steps must be 0 or more"),
    ("algorithm__weight_decay", -0.1, "weight_decay must be 0 or more"),
    ("algorithm__betas", [0.9, 1.0], "betas must lie in [0, 1)"),
    ("algorithm__clip_low", 1.0, "clip_low must lie between 0 and 1"),
    ("algorithm__clip_high", 0, "clip_high must be above 0"),
    ("algorithm__gradient_clip", 0, "gradient_clip must be above 0"),
    ("algorithm__collective_timeout_seconds", 0, "collective_timeout_seconds must be above 0"),
    ("rollout__temperature", 0, "temperature must be above 0"),
    ("rollout__eval_temperature", -1, "eval_temperature must be 0 (greedy) or more"),
    ("rollout__top_k", -1, "top_k must be 0 (off) or more"),
    ("rollout__cache_tokens", 0, "cache_tokens must be at least 1, or auto"),
    ("rollout__cache_tokens", 4096, "cache_tokens needs engine: sglang; the native engine caches"),
    ("rollout__top_p", 0, "top_p must lie in (0, 1]"),
    ("rollout__min_p", 1, "min_p must lie in [0, 1)"),
    ("rollout__eval_top_k", -1, "eval_top_k must be 0 (off) or more"),
    ("rollout__eval_top_p", 0, "eval_top_p must lie in (0, 1]"),
    ("rollout__eval_min_p", 1, "eval_min_p must lie in [0, 1)"),
    ("rollout__max_new_tokens", 0, "max_new_tokens must be at least 1"),
    ("rollout__slots", 0, "slots must be at least 1"),
    ("rollout__max_tries", 0, "max_tries must be at least 1"),
    ("workers__stuck_seconds", 0, "stuck_seconds must be above 0"),
    ("workers__max_restarts", -1, "max_restarts must be 0 or more"),
]


@pytest.mark.parametrize(("key", "value", "complaint"), BOUNDS)
def test_refuses_value_out_of_bounds(key: str, value: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**{key: value})
    assert str(error.value).startswith(f"job.yaml: {key.partition('__')[0]}: {complaint}")


def test_reads_what_of_the_policy_is_trained() -> None:
    assert parse().policy.lora is None
    assert parse(policy__lora={}).policy.lora == LoraSpec(rank=16, alpha=32, dropout=0.0)
    assert parse(policy__lora={"targets": ["q_proj"]}).policy.lora == LoraSpec(targets=("q_proj",))
    assert parse(policy__freeze=["*.bias"]).policy.freeze == ("*.bias",)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"policy__lora": {}, "policy__freeze": ["*.bias"]}, "freeze has nothing to say"),
        ({"policy__lora": {}, "algorithm__shards": "all"}, r"need algorithm\.shards: 1"),
        ({"policy__freeze": ["*.bias"], "algorithm__shards": 2}, r"need algorithm\.shards: 1"),
        ({"policy__lora": {"targets": "q_proj"}}, "policy.lora.targets"),
        ({"policy__lora": {"targets": []}}, "policy.lora: targets must not be empty"),
        ({"policy__lora": {"rank": 0}}, "policy.lora: rank must be at least 1"),
        ({"policy__lora": {"alpha": 0}}, "policy.lora: alpha must be at least 1"),
        ({"policy__lora": {"dropout": 1}}, r"policy.lora: dropout must lie in \[0, 1\)"),
    ],
)
def test_refuses_parts_to_train_that_do_not_go_together(
    changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse(**changes)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a*"])
def test_refuses_name_that_no_folder_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job.yaml: name may hold letters, digits"):
        parse(name=name)


@pytest.mark.parametrize(("key", "value"), [("top_k", 5), ("top_p", 0.9), ("min_p", 0.1)])
def test_refuses_filtered_sampling_without_the_flag(key: str, value: float) -> None:
    changes = {f"rollout__{key}": value}
    with pytest.raises(ConfigError, match=r"set algorithm.allow_filtered_sampling: true"):
        parse(**changes)
    assert parse(**changes, algorithm__allow_filtered_sampling=True).rollout.filtered


SPECULATIONS: list[tuple[dict[str, Any], str]] = [
    ({"mode": "static"}, "speculation: mode static needs a strategy, and only that does"),
    ({"strategy": {"type": "off"}}, "speculation: mode static needs a strategy"),
    ({"mode": "adaptive", "depths": [0]}, "speculation: at least 1 token must be guessed"),
    ({"mode": "adaptive", "ngrams": [65]}, "speculation: at most 64 tokens can be guessed at once"),
    ({"mode": "adaptive", "depths": [64]}, "speculation guesses 64 tokens at once, and an answer"),
    ({"ngram_megabytes": 0}, "speculation: ngram_megabytes must be above 0"),
    (
        {"mode": "static", "strategy": {"type": "draft", "dept": 2}},
        "speculation.strategy: Object contains unknown field `dept`",
    ),
]


@pytest.mark.parametrize(("section", "complaint"), SPECULATIONS)
def test_refuses_impossible_speculation(section: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(speculation=section, rollout__max_new_tokens=60)
    assert str(error.value).startswith(f"job.yaml: {complaint}")


def test_refuses_min_p_where_verification_would_ignore_it() -> None:
    filtered = {"rollout__min_p": 0.1, "algorithm__allow_filtered_sampling": True}
    with pytest.raises(ConfigError, match=r"rollout.min_p with speculation needs rollout.engine"):
        parse(speculation__mode="adaptive", rollout__engine="sglang", **filtered)
    parse(speculation__mode="adaptive", rollout__engine="sglang")
    parse(rollout__engine="sglang", **filtered)


def test_lists_the_strategies_to_choose_from() -> None:
    assert parse(speculation__mode="off").speculation.arms == ()
    static = {"mode": "static", "strategy": {"type": "draft", "depth": 4, "noise": False}}
    drafted = parse(speculation=static, drafter__path="drafter")
    assert drafted.speculation.arms == (Draft(depth=4, noise=False),)
    assert drafted.drafter.path == "/specs/drafter"
    with pytest.raises(ConfigError, match=r"strategy needs a drafter: set drafter.path"):
        parse(speculation=static, drafter__train="off")
    adaptive = parse(speculation={"mode": "adaptive", "depths": [2], "ngrams": [9]}).speculation
    assert adaptive.arms == (
        Off(),
        Draft(depth=2, noise=True),
        Draft(depth=2, noise=False),
        Ngram(tokens=9),
    )
    assert adaptive.longest == 9


def test_refuses_evaluations_without_data() -> None:
    with pytest.raises(ConfigError, match=r"eval_every needs data.eval"):
        parse(algorithm__eval_every=2)
    assert parse(algorithm__eval_every=2, data__eval="eval.jsonl").data.eval == "/specs/eval.jsonl"


# --- the file


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("2E+1", 20.0), (".5e-1", 0.05), ("1", 1.0)]
)
def test_reads_scientific_notation_as_a_number(text: str, value: float, tmp_path: Path) -> None:
    raw = yaml.safe_dump(RAW).replace("group_size: 2", f"group_size: 2\n  learning_rate: {text}")
    assert load(tmp_path, raw).algorithm.learning_rate == value
    spec = load(tmp_path, yaml.safe_dump(RAW), f"algorithm.learning_rate={text}")
    assert spec.algorithm.learning_rate == value


@pytest.mark.parametrize("text", ["off", "'off'"])
def test_reads_off_as_a_word(text: str, tmp_path: Path) -> None:
    raw = yaml.safe_dump(RAW) + f"speculation:\n  mode: {text}\n"
    assert load(tmp_path, raw).speculation.mode == "off"
    assert load(tmp_path, raw, f"speculation.mode={text}").speculation.mode == "off"
    assert load(tmp_path, raw, "algorithm.keep_best=no").algorithm.keep_best is False


def test_set_overrides_the_file(tmp_path: Path) -> None:
    spec = load(
        tmp_path,
        yaml.safe_dump(RAW),
        "algorithm.steps=7",
        "rollout.stop=['#', \"1e5\"]",
        "data.answer_key=null",
        "name=other",
        "algorithm.steps=8",
    )
    assert (spec.algorithm.steps, spec.rollout.stop, spec.data.answer_key, spec.name) == (
        8,
        ["#", "1e5"],
        None,
        "other",
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("algorithm.steps", "--set algorithm.steps: write --set section.key=value"),
        ("name.part=1", "--set name.part=1: name is not a section"),
        ("name=[", "--set name=[: while parsing"),
        ("name=2024-13-45", "--set name=2024-13-45: month must be in 1..12"),
        ("algorithm.step=3", "{}: algorithm.step: unknown key; did you mean 'steps'?"),
        ("=3", "{}: : unknown key"),
    ],
)
def test_refuses_wrong_override_and_names_it(override: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, yaml.safe_dump({"name": "x", **RAW}), override)
    assert str(error.value).startswith(line.format(tmp_path / "job.yaml"))
    assert "\n" not in str(error.value)


def test_paths_are_relative_to_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")
    (tmp_path / "specs").mkdir()
    spec = load(
        tmp_path / "specs",
        yaml.safe_dump(RAW),
        "policy.path=../model",
        "data.train=~/train.jsonl",
        "data.eval=/abs/eval.jsonl",
        "reward.kind=function",
        "reward.function=code/reward.py:score",
    )
    assert spec.policy.path == str(tmp_path / "model")
    assert spec.data.train == "/home/user/train.jsonl"
    assert spec.data.eval == "/abs/eval.jsonl"
    assert spec.reward.function == f"{tmp_path}/specs/code/reward.py:score"


def test_mixes_sources(tmp_path: Path) -> None:
    sources = [{"path": "math/train.jsonl", "weight": 2}, {"path": "hf://owner/sums?split=train"}]
    raw = {**RAW, "data": {**RAW["data"], "train": sources}}
    spec = load(tmp_path, yaml.safe_dump(raw), "data.train.1.weight=3")
    assert [s.path for s in spec.data.sources] == [
        f"{tmp_path}/math/train.jsonl",
        sources[1]["path"],
    ]
    assert [source.label for source in spec.data.sources] == ["train", "sums"]
    assert [source.weight for source in spec.data.sources] == [2, 3]


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ([], "data: train: the list is empty"),
        ([{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}], "the source 'x' is there twice"),
        ([{"path": "a", "weight": 0}], "data.train[0]: weight must be above 0 and finite"),
        ([{"path": "a", "wieght": 1}], "data.train.0.wieght: unknown key; did you mean 'weight'?"),
        (["a.jsonl"], "data.train[0]: Expected `object`, got `str`"),
    ],
)
def test_refuses_a_mixture_and_names_the_source(sources: list[Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse(data__train=sources)


def test_keeps_a_dotted_function_as_it_is() -> None:
    spec = parse(reward__kind="function", reward__function="package.module:name")
    assert spec.reward.function == "package.module:name"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"- a\n", "a spec is a mapping with the sections"),
        (b"", "a spec is a mapping with the sections"),
        (b"a: [\n", "not valid YAML: while parsing"),
        (b"a: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
        (b"a: \xff\n", "not UTF-8 text: "),
        (b"a: \x00\n", "not valid YAML: "),
    ],
)
def test_refuses_file_that_is_no_spec(content: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_job_spec(path)
    assert str(error.value).startswith(f"{path}: {line}")
    assert "\n" not in str(error.value)


def test_refuses_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read: No such file or directory"):
        load_job_spec(tmp_path / "none.yaml")


@settings(max_examples=15)
@given(spec=specs, text=st.text(max_size=10), rate=st.floats(1e-12, 1.0))
def test_yaml_of_a_spec_reads_back_as_that_spec(spec: JobSpec, text: str, rate: float) -> None:
    replace = msgspec.structs.replace
    spec = replace(
        spec,
        data=replace(spec.data, system_prompt=text),
        algorithm=replace(spec.algorithm, learning_rate=rate),
    )
    assert read_job_spec(to_yaml(spec), "text", Path("/")) == spec


def test_specs_are_immutable() -> None:
    with pytest.raises(AttributeError):
        SPEC.name = "other"  # pyright: ignore[reportAttributeAccessIssue]
