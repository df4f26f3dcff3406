"""A wrong model, data set or reward is refused in one line."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.tiny_reasoner import task
from tests.namespaces import WITHOUT_NAMESPACES
from tlt.actors.coordinator.preparation_process import SPEC_FILE
from tlt.base.id_types import PromptIndex
from tlt.data.dataset import Prompts, prompts_file, question_of
from tlt.models.config_json import read_config
from tlt.models.safetensors_header import read_folder_shapes
from tlt.preparation.default_speculation import settle_speculation
from tlt.preparation.prepare_job import prepare_or_refuse
from tlt.protocol.shared_values import Prepared, PromptSet
from tlt.spec.config import DrafterSpec, JobSpec, PolicySpec, RolloutSpec, SpeculationSpec
from tlt.spec.data_and_algorithm import EvaluationSet, SourceSpec

MODEL = Path(task.__file__).parent / "model"
# of the two held-out prompts
WEIGHTS = sum(map(math.prod, read_folder_shapes(MODEL).values()))
SIZE = {"policy_weights": WEIGHTS, "trained_weights": WEIGHTS}
ONE_SET = (PromptSet(name="eval", prompts=2),)


def prepared_in(folder: Path, spec: JobSpec) -> Prepared:
    """Return what one fork of the process prepares."""
    found = _result_in(folder, spec)
    assert isinstance(found, Prepared)
    return found


def refusal_in(folder: Path, spec: JobSpec) -> str:
    """Return why one fork of the process refuses the job."""
    error = _result_in(folder, spec)
    assert isinstance(error, str)
    return error


def _result_in(folder: Path, spec: JobSpec) -> Prepared | str:
    (folder / SPEC_FILE).write_bytes(msgspec.json.encode(spec))
    return prepare_or_refuse(folder)


def test_prepares_a_good_job(spec: JobSpec, tmp_path: Path) -> None:
    assert prepared_in(tmp_path, spec) == Prepared(
        train_prompts=3, eval_prompts=2, longest_prompt=7, eval_sets=ONE_SET, **SIZE
    )
    prompts = Prompts(prompts_file(tmp_path, "train"))
    assert len(prompts) == 3
    first = prompts[PromptIndex(0)]
    assert (first.answer, first.row["prompt"]) == ("46", "12+34=")
    assert first.tokens
    # the model's own limit, as the spec has none
    assert first.room == read_config(MODEL).max_positions - len(first.tokens)
    prompts.close()


def _ordered_by(spec: JobSpec, column: str) -> JobSpec:
    data = msgspec.structs.replace(spec.data, order_by=column)
    return msgspec.structs.replace(spec, data=data)


def test_sorts_training_prompts_by_a_column(spec: JobSpec, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n} for n in (3, 1, 2)]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    (tmp_path / "train.jsonl").write_bytes(lines)
    prepared_in(tmp_path, _ordered_by(spec, "level"))
    prompts = Prompts(prompts_file(tmp_path, "train"))
    assert [prompts[PromptIndex(i)].row["level"] for i in range(3)] == [1, 2, 3]
    prompts.close()
    refused = refusal_in(tmp_path, _ordered_by(spec, "difficulty"))
    assert "no key 'difficulty' (data.order_by); it has answer, level, prompt" in refused
    nested = [{**row, "info": {"level": -row["level"]}} for row in rows]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in nested)
    (tmp_path / "train.jsonl").write_bytes(lines)
    prepared_in(tmp_path, _ordered_by(spec, "info.level"))
    prompts = Prompts(prompts_file(tmp_path, "train"))
    assert [prompts[PromptIndex(i)].row["level"] for i in range(3)] == [3, 2, 1]
    prompts.close()


def test_refuses_a_column_whose_values_have_no_order(spec: JobSpec, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2", "level": level} for level in (1, "hard")]
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    (tmp_path / "train.jsonl").write_bytes(lines)
    refused = refusal_in(tmp_path, _ordered_by(spec, "level"))
    assert "can't be compared" in refused


def with_prompts(spec: JobSpec, folder: Path, terms: list[int], **data: Any) -> JobSpec:
    """Return a spec whose training problems are sums of so many terms."""
    task.write_rows([(12,) * count for count in terms], folder / "mixed.jsonl")
    changed = msgspec.structs.replace(
        spec.data, train=str(folder / "mixed.jsonl"), eval=None, eval_limit=None, **data
    )
    return msgspec.structs.replace(spec, data=changed)


def test_leaves_out_prompts_that_are_too_long(spec: JobSpec, tmp_path: Path) -> None:
    mixed = with_prompts(spec, tmp_path, [2, 9, 3, 9], max_prompt_tokens=12)
    assert prepared_in(tmp_path, mixed) == Prepared(
        train_prompts=2, eval_prompts=0, longest_prompt=10, skipped_prompts=2, **SIZE
    )
    prompts = Prompts(prompts_file(tmp_path, "train"))
    assert [prompts[PromptIndex(i)].row["prompt"] for i in range(2)] == ["12+12=", "12+12+12="]
    prompts.close()


def test_refuses_prompts_that_are_too_long_if_the_spec_says_so(
    spec: JobSpec, tmp_path: Path
) -> None:
    mixed = with_prompts(spec, tmp_path, [2, 9], max_prompt_tokens=12, long_prompts="refuse")
    error = refusal_in(tmp_path, mixed)
    assert "mixed.jsonl:2: the prompt has 28 tokens, and at most 12 fit" in error


def test_refuses_heads_that_ranks_cannot_share(spec: JobSpec, tmp_path: Path) -> None:
    rollout = msgspec.structs.replace(spec.rollout, engine="sglang", tensor_parallel=4)
    error = refusal_in(tmp_path, msgspec.structs.replace(spec, rollout=rollout))
    assert "4 ranks can't share the policy's 1 heads" in error


def test_prepares_evaluation_sets_one_after_the_other(spec: JobSpec, tmp_path: Path) -> None:
    """Each has its own columns, limit and count of prompts that are too long."""
    rows = [{"sum": f"{12 + n}+1=", "total": str(n + 13)} for n in range(4)]
    rows.insert(1, {"sum": "+".join(["12"] * 9) + "=", "total": "108"})
    own = tmp_path / "own.jsonl"
    own.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    sets = {
        "own": EvaluationSet(path=str(own), limit=3, prompt_key="sum", answer_key="total"),
        "plain": EvaluationSet(path=str(spec.data.eval)),
    }
    data = msgspec.structs.replace(spec.data, eval=sets, max_prompt_tokens=20)
    found = prepared_in(tmp_path, msgspec.structs.replace(spec, data=data))
    assert found.eval_sets == (
        PromptSet(name="own", prompts=3, skipped=1),
        PromptSet(name="plain", prompts=2),
    )
    assert (found.eval_prompts, found.skipped_prompts) == (5, 1)
    prompts = Prompts(prompts_file(tmp_path, "eval"))
    assert [prompts[PromptIndex(i)].set for i in range(5)] == ["own"] * 3 + ["plain"] * 2
    assert prompts[PromptIndex(1)].answer == "14"
    assert question_of(prompts[PromptIndex(0)], data) == "12+1="
    prompts.close()


def test_a_job_that_only_evaluates_reads_no_training_data(spec: JobSpec, tmp_path: Path) -> None:
    algorithm = msgspec.structs.replace(spec.algorithm, steps=0, eval_every=1)
    (tmp_path / "train.jsonl").unlink()
    found = prepared_in(tmp_path, msgspec.structs.replace(spec, algorithm=algorithm))
    assert (found.train_prompts, found.eval_prompts) == (0, 2)


def test_refuses_data_whose_prompts_are_all_too_long(spec: JobSpec, tmp_path: Path) -> None:
    mixed = with_prompts(spec, tmp_path, [9], max_prompt_tokens=12)
    assert "all prompts have more than 12 tokens" in refusal_in(tmp_path, mixed)


@pytest.mark.parametrize(
    ("section", "changes", "line"),
    [
        ("policy", {"path": "/nowhere"}, "/nowhere"),
        ("policy", {"max_context": 4}, "train.jsonl: all prompts have more than 3 tokens"),
        ("data", {"train": "/nowhere.jsonl"}, "/nowhere.jsonl: no such file"),
        ("data", {"answer_key": "solution"}, "train.jsonl:1: no key 'solution' (data.answer_key)"),
        ("reward", {"function": "no.such:name"}, "reward.function: no.such cannot be imported"),
        ("reward", {"kind": "regex", "pattern": "("}, "reward.pattern: '(': missing )"),
    ],
)
def test_refuses_a_wrong_job_in_one_line(
    section: str,
    changes: dict[str, Any],
    line: str,
    spec: JobSpec,
    tmp_path: Path,
) -> None:
    replace = msgspec.structs.replace
    wrong = replace(spec, **{section: replace(getattr(spec, section), **changes)})
    error = refusal_in(tmp_path, wrong)
    assert line in error
    assert "\n" not in error


_PREPARE = """
import sys
from pathlib import Path
from tlt.preparation.default_speculation import settle_speculation
from tlt.preparation.prepare_job import prepare_or_refuse
for folder in sys.argv[1:]:
    print("result:", prepare_or_refuse(Path(folder)))
"""


def test_runs_no_function_unconfined_unless_the_spec_says_so(spec: JobSpec, tmp_path: Path) -> None:
    replace = msgspec.structs.replace
    consenting = replace(spec, reward=replace(spec.reward, isolation="available"))
    folders = [tmp_path / "refused", tmp_path / "consenting"]
    for folder, each in zip(folders, (spec, consenting), strict=True):
        folder.mkdir()
        (folder / SPEC_FILE).write_bytes(msgspec.json.encode(each))
    done = subprocess.run(
        [*WITHOUT_NAMESPACES, sys.executable, "-c", _PREPARE, *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
    )
    refused, consented = re.findall("^result: .*", done.stdout, re.MULTILINE)
    assert "reward.isolation: the host allows no user namespaces" in refused
    assert consented.startswith("result: Prepared(")


def test_prepares_a_mixture_source_by_source(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_bytes(
        b'{"question": "1+2=", "solution": "3", "level": 2}\n'
        b'{"question": "5+4=", "solution": "9", "level": 1}\n'
    )
    task.write_rows([(12, 34)], tmp_path / "sums.jsonl")
    sources = (
        SourceSpec(path=str(tmp_path / "sums.jsonl")),
        SourceSpec(
            path=str(tmp_path / "other.jsonl"),
            name="harder",
            prompt_key="question",
            answer_key="solution",
        ),
    )
    mixed = msgspec.structs.replace(
        spec, data=msgspec.structs.replace(spec.data, train=sources, eval=None, eval_limit=None)
    )
    prepared = prepared_in(tmp_path, mixed)
    assert prepared == Prepared(
        train_prompts=3, eval_prompts=0, longest_prompt=7, train_sources=(1, 2), **SIZE
    )
    prompts = Prompts(prompts_file(tmp_path, "train"))
    found = [prompts[PromptIndex(i)] for i in range(3)]
    prompts.close()
    assert [prompt.row["source"] for prompt in found] == ["sums", "harder", "harder"]
    assert [prompt.row["prompt"] for prompt in found] == ["12+34=", "1+2=", "5+4="]
    assert [prompt.answer for prompt in found] == ["46", "3", "9"]


def test_names_the_source_without_rows(spec: JobSpec, tmp_path: Path) -> None:
    task.write_rows([(12, 34)], tmp_path / "sums.jsonl")
    task.write_rows([(12,) * 9], tmp_path / "long.jsonl")
    paths = [str(tmp_path / name) for name in ("sums.jsonl", "long.jsonl")]
    data = msgspec.structs.replace(
        spec.data,
        train=tuple(SourceSpec(path=path) for path in paths),
        max_prompt_tokens=12,
    )
    refused = refusal_in(tmp_path, msgspec.structs.replace(spec, data=data))
    assert refused.startswith(f"{paths[1]}: all prompts have more than 12 tokens")


@pytest.mark.parametrize(
    ("ending", "in_thought"),
    [("<think>\n", True), ("[THINK]", True), ("<think>\n\n</think>\n\n", False), ("", False)],
)
def test_knows_prompts_that_open_a_thought(
    spec: JobSpec, tmp_path: Path, ending: str, in_thought: bool
) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    # the vocabulary has no letters: the tag is one unknown token
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}" + ending
    )
    replace = msgspec.structs.replace
    data = replace(spec.data, chat_template=True)
    spec = replace(spec, policy=replace(spec.policy, path=str(model)), data=data)
    prepared_in(tmp_path, spec)
    for purpose in ("train", "eval"):
        prompts = Prompts(prompts_file(tmp_path, purpose))
        assert prompts[PromptIndex(0)].in_thought is in_thought
        prompts.close()


@pytest.mark.parametrize(
    ("shape", "changes", "complaint"),
    [
        (
            {"max_position_embeddings": 12},
            {},
            "speculation guesses 12 tokens at once, in a context of 12",
        ),
        (
            {"num_hidden_layers": 2},
            {"drafter": DrafterSpec(layout="eagle3")},
            "EAGLE-3 needs a policy of three layers, this one has 2; train with layout: eagle",
        ),
        (
            {"num_key_value_heads": 2},
            {
                "rollout": RolloutSpec(engine="sglang", tensor_parallel=2),
                "drafter": DrafterSpec(hot_tokens=7),
            },
            "rollout.tensor_parallel: 2 ranks can't share the drafter's 7 tokens to propose "
            "(drafter.hot_tokens) evenly",
        ),
    ],
)
def test_only_a_job_that_must_speculate_is_refused_where_it_cannot(
    spec: JobSpec,
    tmp_path: Path,
    shape: dict[str, int],
    changes: dict[str, Any],
    complaint: str,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = msgspec.json.decode((model / "config.json").read_bytes())
    (model / "config.json").write_bytes(msgspec.json.encode({**config, **shape}))
    by_default = _by_default(spec, policy=PolicySpec(path=str(model)), **changes)
    found = prepared_in(tmp_path, by_default)
    assert found.no_speculation == complaint
    settled = found.settle(by_default)
    assert (settled.speculation.mode, settled.drafter.train) == ("off", "off")
    assert settle_speculation(by_default) == (settled, complaint)
    adaptive = SpeculationSpec(mode="adaptive")
    asked = msgspec.structs.replace(by_default, speculation=adaptive)
    assert refusal_in(tmp_path, asked) == complaint


def _by_default(spec: JobSpec, **changes: Any) -> JobSpec:
    sections = {"speculation": SpeculationSpec(), "drafter": DrafterSpec(), **changes}
    return msgspec.structs.replace(spec, **sections)


def test_a_job_speculates_where_it_can(spec: JobSpec, tmp_path: Path) -> None:
    by_default = _by_default(spec)
    found = prepared_in(tmp_path, by_default)
    assert found.no_speculation is msgspec.UNSET
    assert b"no_speculation" not in msgspec.json.encode(found)
    settled = found.settle(by_default)
    assert (settled.speculation.mode, settled.drafter.train) == ("adaptive", "auto")
    # a job that was submitted to an earlier version has both keys, and keeps to them
    assert found.settle(spec) == spec
