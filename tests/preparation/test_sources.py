"""Rows that name their sources are checked against the rewards before a job starts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.in_process_cli import run_command
from tests.preparation.test_prepare_job import prepared_in, refusal_in
from tlt.base.id_types import PromptIndex, Purpose
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import EvaluationSet, SourceSpec
from tlt.spec.reward import RewardSpec
from tlt.spec.spec_files import to_yaml

NUMERIC = RewardSpec(kind="numeric", sources=("sums", "held"))
BOXED = RewardSpec(kind="boxed", sources=("hard",))


def write(file: Path, *sources: str | None, **columns: Any) -> str:
    rows = [
        {"prompt": f"{index}+1=", "answer": "2", "of": {"source": source}, **columns}
        for index, source in enumerate(sources)
    ]
    file.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return str(file)


@pytest.fixture
def keyed(spec: JobSpec, tmp_path: Path) -> JobSpec:
    """Return a job whose rows name two sources; the rows of its held-out set name none."""
    data = msgspec.structs.replace(
        spec.data,
        train=write(tmp_path / "train.jsonl", "sums", "hard", "sums"),
        eval={"held": EvaluationSet(path=write(tmp_path / "held.jsonl", None))},
        source_key="of.source",
    )
    return msgspec.structs.replace(spec, data=data, reward=(NUMERIC, BOXED))


def with_reward(spec: JobSpec, *rewards: RewardSpec) -> JobSpec:
    return msgspec.structs.replace(spec, reward=rewards)


def with_data(spec: JobSpec, **changes: Any) -> JobSpec:
    return msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, **changes))


def read(folder: Path, purpose: Purpose) -> list[Prompt]:
    prompts = Prompts(prompts_file(folder, purpose))
    try:
        return [prompts[PromptIndex(index)] for index in range(len(prompts))]
    finally:
        prompts.close()


def test_a_prompt_has_the_names_of_its_file_and_of_its_row(keyed: JobSpec, tmp_path: Path) -> None:
    prepared_in(tmp_path, keyed)
    found = [prompt.sources for prompt in read(tmp_path, "train")]
    assert found == [("train", "sums"), ("train", "hard"), ("train", "sums")]
    assert [prompt.sources for prompt in read(tmp_path, "eval")] == [("held",)]


def test_refuses_a_row_that_no_reward_scores(keyed: JobSpec, tmp_path: Path) -> None:
    hardly = msgspec.structs.replace(BOXED, sources=("hrad",))
    refused = refusal_in(tmp_path, with_reward(keyed, NUMERIC, hardly))
    named = "no reward scores 'hard': it is in no reward's sources; did you mean 'hrad'?"
    assert refused == f"{tmp_path}/train.jsonl:2: {named}"
    held = msgspec.structs.replace(NUMERIC, sources=("sums",))
    refused = refusal_in(tmp_path, with_reward(keyed, held, BOXED))
    assert refused.startswith(f"{tmp_path}/held.jsonl:1: no reward scores 'held'")


def test_refuses_a_name_that_no_row_has(keyed: JobSpec, tmp_path: Path) -> None:
    more = msgspec.structs.replace(BOXED, sources=("hard", "hardest"))
    refused = refusal_in(tmp_path, with_reward(keyed, NUMERIC, more))
    named = "no source or set has the name 'hardest'; did you mean 'hard'?"
    assert refused == f"reward.1.sources: {named}"


def test_a_job_that_only_evaluates_may_name_what_is_trained_on(
    keyed: JobSpec, tmp_path: Path
) -> None:
    algorithm = msgspec.structs.replace(keyed.algorithm, steps=0, eval_every=1)
    assert prepared_in(tmp_path, msgspec.structs.replace(keyed, algorithm=algorithm))


def test_a_limit_hides_no_source(keyed: JobSpec, tmp_path: Path) -> None:
    """A name that only rows beyond the limit have is one all the same."""
    held = EvaluationSet(path=write(tmp_path / "held.jsonl", None, None, "rare"), limit=1)
    rare = msgspec.structs.replace(BOXED, sources=("hard", "rare"))
    found = prepared_in(tmp_path, with_data(with_reward(keyed, NUMERIC, rare), eval={"held": held}))
    assert found.eval_prompts == 1


def test_refuses_a_column_of_sources_that_no_row_has(keyed: JobSpec, tmp_path: Path) -> None:
    everything = RewardSpec(kind="numeric")
    refused = refusal_in(tmp_path, with_data(with_reward(keyed, everything), source_key="origin"))
    line = "no key 'origin' (data.source_key); it has answer, of.source, prompt"
    assert refused == f"{tmp_path}/train.jsonl:1: {line}"
    refused = refusal_in(tmp_path, with_data(keyed, source_key="of.sauce"))
    assert refused.startswith(f"{tmp_path}/train.jsonl:1: no reward scores 'train'")
    assert refused.endswith(", and it has no 'of.sauce' (data.source_key)")
    sources = (
        SourceSpec(path=str(keyed.data.train), source_key="of.source"),
        SourceSpec(path=write(tmp_path / "other.jsonl", None), source_key="of.sauce"),
    )
    mixed = with_data(with_reward(keyed, everything), source_key=None, train=sources)
    assert "'of.sauce' (data.train.1.source_key)" in refusal_in(tmp_path, mixed)


def test_rows_of_a_mixture_have_both_names(keyed: JobSpec, tmp_path: Path) -> None:
    other = SourceSpec(path=write(tmp_path / "sums.jsonl", None))
    mixed = with_data(keyed, train=(SourceSpec(path=str(keyed.data.train)), other))
    prepared_in(tmp_path, mixed)
    found = read(tmp_path, "train")
    assert [prompt.sources for prompt in found[1:]] == [
        ("train", "hard"),
        ("train", "sums"),
        ("sums",),
    ]
    assert [prompt.row["source"] for prompt in found] == ["train"] * 3 + ["sums"]


def test_prompts_of_a_mixture_are_found_under_one_name(spec: JobSpec, tmp_path: Path) -> None:
    nested = write(tmp_path / "nested.jsonl", None, info={"question": "1+2="})
    plain = write(tmp_path / "plain.jsonl", None)
    sources = (SourceSpec(path=nested), SourceSpec(path=plain, prompt_key="prompt"))
    mixed = with_data(spec, train=sources, prompt_key="info.question", eval=None)
    prepared_in(tmp_path, mixed)
    assert [each.row["info.question"] for each in read(tmp_path, "train")] == ["1+2=", "0+1="]


def test_the_command_that_checks_a_spec_checks_its_sources(keyed: JobSpec, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(to_yaml(keyed))
    assert run_command("config", "check", str(file)).code == 0
    done = run_command("config", "check", str(file), "--set", "reward.1.sources=[hrad]")
    assert done.code != 0
    assert "train.jsonl:2: no reward scores 'hard'" in done.stderr
