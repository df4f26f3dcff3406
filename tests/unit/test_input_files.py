"""Inputs of programs stay while a job may read them, and no longer."""

from pathlib import Path

import msgspec
import pytest

from tests.simulation.specs import small_spec
from tlt.api.discard_unnamed_inputs import discard_unnamed, locked_folder
from tlt.base.id_types import JobId
from tlt.protocol.shared_values import JobRecord
from tlt.spec.config import DataSpec, JobSpec
from tlt.store.job_requests import new_record


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    with locked_folder(tmp_path) as folder:
        for name in ("train-1.jsonl", "train-2.jsonl"):
            (folder / name).touch()
        return folder


def spec_with(file: Path) -> JobSpec:
    return msgspec.structs.replace(small_spec(), data=DataSpec(train=str(file)))


def record_of(inputs: Path, status: str = "queued") -> JobRecord:
    record = new_record(JobId("a-1"), spec_with(inputs / "train-1.jsonl"), f"{inputs.parent}/a-1")
    return msgspec.structs.replace(record, status=status)


def left(inputs: Path) -> set[str]:
    return {file.name for file in inputs.iterdir()} - {".lock"}


def test_what_a_runs_spec_names_stays(inputs: Path) -> None:
    run = inputs.parent / "a-1"
    run.mkdir()
    spec = spec_with(inputs / "train-1.jsonl")
    (run / "spec.json").write_bytes(msgspec.json.encode(spec))
    discard_unnamed(inputs, [])
    assert left(inputs) == {"train-1.jsonl"}
    (run / "spec.json").unlink()
    run.rmdir()
    discard_unnamed(inputs, [])
    assert left(inputs) == set()


def test_what_a_queued_job_names_stays_until_it_ends(inputs: Path) -> None:
    (inputs.parent / "a-1").mkdir()
    discard_unnamed(inputs, [record_of(inputs)])
    assert left(inputs) == {"train-1.jsonl"}
    discard_unnamed(inputs, [record_of(inputs, "cancelled")])
    assert left(inputs) == set()


def test_all_stays_while_another_session_may_have_queued_a_job(inputs: Path) -> None:
    (inputs.parent / "b-1" / "blobs").mkdir(parents=True)
    discard_unnamed(inputs, [])
    assert left(inputs) == {"train-1.jsonl", "train-2.jsonl"}
