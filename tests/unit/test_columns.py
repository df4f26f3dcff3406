"""A column is found by its name, or by its path through mappings; what is missing is named."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.verl_rows import code_row, gsm8k_row, write_parquet
from tlt.base.id_types import PromptIndex
from tlt.data.columns import column_of, find_column, sources_of
from tlt.data.dataset import Prompt, Prompts, prompt_of, question_of, rows
from tlt.errors import DataError
from tlt.spec.data_and_algorithm import DataSpec, EvaluationSet, SourceSpec
from tlt.spec.prompt_files import prompt_files, train_files

ROW = {"a.b": 1, "a": {"b": 2, "c": {"d": None}, "e": [3]}, "f": 4}


def test_a_literal_name_wins_over_a_path() -> None:
    assert column_of(ROW, "a.b") == 1
    assert column_of({"a": ROW["a"]}, "a.b") == 2
    assert column_of(ROW, "a.c.d") is None
    assert column_of(ROW, "f") == 4


@pytest.mark.parametrize("name", ["b", "a.x", "a.b.c", "a.e.0", "a.c.d.x", "", "."])
def test_a_path_that_leads_nowhere_is_no_column(name: str) -> None:
    with pytest.raises(KeyError):
        column_of(ROW, name)
    assert find_column(ROW, name) is None


def test_reads_rows_as_verl_writes_them(tmp_path: Path) -> None:
    written = [gsm8k_row(0, "1+1?", "#### 2"), code_row(1, "Print.", {"inputs": [], "outputs": []})]
    data = DataSpec(
        train=write_parquet(tmp_path / "train.parquet", written),
        prompt_key="extra_info.question",
        answer_key="reward_model.ground_truth",
        source_key="data_source",
    )
    file = train_files(data)[0]
    found = rows(file)
    location, row = next(found)
    assert column_of(row, "extra_info.question") == "1+1?"
    assert column_of(row, "reward_model.ground_truth") == "2"
    assert sources_of(row, file, location) == ("train", "openai/gsm8k")
    with pytest.raises(DataError, match=r"row 2: no key 'extra_info.question' \(data.prompt_key\)"):
        next(found)


def complaint(data: DataSpec, index: int = 0) -> str:
    with pytest.raises(DataError) as error:
        list(rows(prompt_files(data)[index]))
    return str(error.value).partition(": ")[2]


def jsonl(folder: Path, row: dict[str, Any]) -> str:
    file = folder / "rows.jsonl"
    file.write_bytes(msgspec.json.encode(row))
    return str(file)


def test_names_the_key_that_was_set_and_the_columns_that_there_are(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"q": "1+1=", "a": {"text": "2", "more": {"b": 1}}})
    sources = (
        SourceSpec(path=path, name="first", prompt_key="q"),
        SourceSpec(path=path, answer_key="a.answer", prompt_key="q"),
    )
    sets = {"aime": EvaluationSet(path=path, prompt_key="problem")}
    data = DataSpec(train=sources, eval=sets, answer_key="solution")
    has = "; it has a.more.b, a.text, q"
    assert complaint(data, 0) == f"no key 'solution' (data.answer_key){has}"
    assert complaint(data, 1) == f"no key 'a.answer' (data.train.1.answer_key){has}"
    assert complaint(data, 2) == f"no key 'problem' (data.eval.aime.prompt_key){has}"
    wrong = DataSpec(train=(SourceSpec(path=path, prompt_key="a"),), answer_key=None)
    named = "'a' is neither text nor a list of messages (data.train.0.prompt_key)"
    assert complaint(wrong) == named


def test_lists_some_columns_of_a_wide_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {f"c{n:02d}": n for n in range(60)})
    said = complaint(DataSpec(train=path))
    assert said.endswith("c38, c39, …")


def test_a_row_without_a_source_has_the_name_of_its_file(tmp_path: Path) -> None:
    file = train_files(DataSpec(train=str(tmp_path / "sums.jsonl"), source_key="of.source"))[0]
    assert sources_of({"of": {"source": "x"}}, file, "row 1") == ("sums", "x")
    for row in ({}, {"of": None}, {"of": {"source": None}}):
        assert sources_of(row, file, "row 1") == ("sums",)
    with pytest.raises(DataError, match=r"row 1: 'of.source' is no text \(data.source_key\)"):
        sources_of({"of": {"source": 3}}, file, "row 1")


def test_a_question_is_found_in_a_nested_column(tmp_path: Path) -> None:
    held_out = EvaluationSet(path="x", prompt_key="info.problem")
    data = DataSpec(train="x", eval={"own": held_out}, prompt_key="info.question")
    row = {"info": {"question": [{"role": "user", "content": "1+1"}], "problem": "2+2"}}
    Prompts.write(tmp_path / "prompts", [Prompt(tokens=(1,), row=row, set="own")])
    prompts = Prompts(tmp_path / "prompts")
    assert question_of(prompts[PromptIndex(0)], data) == "2+2"
    prompts.close()
    assert question_of(Prompt(tokens=(1,), row=row), data) == "user: 1+1"
    assert prompt_of(Prompt(tokens=(1,), row={}), data) is None
