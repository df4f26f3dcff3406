"""Invariant: whatever is wrong with a job's model, data or reward is one line that refuses it."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples.tiny_reasoner import task
from tests.samples import SPEC
from tlt import prepare as prepare_module
from tlt.actors.preparing import SPEC_FILE, prepare
from tlt.config import JobSpec, PolicySpec
from tlt.dataset import Prepared, Prompts, prompts_file
from tlt.messages import JobPrepared, JobRefused
from tlt.types import JobId, PromptIndex

MODEL = Path(task.__file__).parent / "model"
JOB = JobId("job-1")


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    for name, terms in (("train", 3), ("eval", 5)):
        problems = [(12, 34)] * terms
        task.write_rows(problems, tmp_path / f"{name}.jsonl")
    (tmp_path / "noisy.py").write_text(
        'print(\'{"error": "printed"}\')\ndef reward(**_):\n    return 1\n'
    )
    replace = msgspec.structs.replace
    return replace(
        SPEC,
        policy=PolicySpec(path=str(MODEL)),
        data=replace(
            SPEC.data,
            train=str(tmp_path / "train.jsonl"),
            eval=str(tmp_path / "eval.jsonl"),
            eval_limit=2,
        ),
        reward=replace(SPEC.reward, kind="function", function=f"{tmp_path / 'noisy.py'}:reward"),
    )


def run_main(
    spec: JobSpec,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capture: pytest.CaptureFixture[bytes],
) -> Prepared:
    """What the process does after its imports, which take long."""
    (folder / SPEC_FILE).write_bytes(msgspec.json.encode(spec))
    monkeypatch.setattr("sys.argv", ["prepare", str(folder)])
    prepare_module.main()
    return msgspec.json.decode(capture.readouterr().out, type=Prepared)


def test_good_job_is_prepared_though_its_code_prints(
    spec: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    prepared = run_main(spec, tmp_path, monkeypatch, capfdbinary)
    assert prepared == Prepared(train_prompts=3, eval_prompts=2)
    prompts = Prompts(prompts_file(tmp_path, "train"))
    assert len(prompts) == 3
    first = prompts[PromptIndex(0)]
    assert (first.answer, first.row["prompt"]) == ("46", "12+34=")
    assert first.tokens
    prompts.close()


async def test_folder_that_cannot_be_written(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert await prepare(JOB, spec, folder) == JobRefused(
        job=JOB, error=f"{folder}: cannot be written: Not a directory"
    )


async def test_process_that_ends_without_an_answer(
    spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys\nprint('first\\nlast', file=sys.stderr, flush=True)\nos._exit(4)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert await prepare(JOB, spec, tmp_path / "run") == JobRefused(
        job=JOB, error="preparing ended with 4: last"
    )


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        (
            Prepared(train_prompts=3, eval_prompts=2),
            JobPrepared(job=JOB, train_prompts=3, eval_prompts=2),
        ),
        (Prepared(error="why"), JobRefused(job=JOB, error="why")),
    ],
)
async def test_what_the_process_says_is_the_outcome(
    said: Prepared,
    outcome: JobPrepared | JobRefused,
    spec: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = msgspec.json.encode(said).decode()
    code = f"import os\nprint({line!r}, flush=True)\nos._exit(0)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert await prepare(JOB, spec, tmp_path / "run") == outcome


@pytest.mark.parametrize(
    ("section", "changes", "line"),
    [
        ("policy", {"path": "/nowhere"}, "/nowhere"),
        ("policy", {"max_context": 4}, "train.jsonl:1: the prompt has 7 tokens, which leaves no"),
        ("data", {"train": "/nowhere.jsonl"}, "/nowhere.jsonl: no such file"),
        ("data", {"answer_key": "solution"}, "train.jsonl:1: no key 'solution' (data.answer_key)"),
        ("reward", {"function": "no.such:name"}, "reward.function: no.such cannot be imported"),
        ("reward", {"kind": "regex", "pattern": "("}, "reward.pattern: '(': missing )"),
    ],
)
def test_wrong_job_is_refused_in_one_line(
    section: str,
    changes: dict[str, Any],
    line: str,
    spec: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    replace = msgspec.structs.replace
    wrong = replace(spec, **{section: replace(getattr(spec, section), **changes)})
    prepared = run_main(wrong, tmp_path, monkeypatch, capfdbinary)
    assert prepared.error is not None
    assert line in prepared.error
    assert "\n" not in prepared.error
