"""The process that prepares jobs ends with its parent, and is started again if it ends."""

import asyncio
import math
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest

from examples.tiny_reasoner import task
from tests.namespaces import is_inhabited
from tests.waiting import wait_until
from tlt.actors.coordinator.preparation_process import Preparer
from tlt.base.id_types import JobId
from tlt.models.safetensors_header import read_folder_shapes
from tlt.protocol.events import JobPrepared, JobRefused
from tlt.protocol.shared_values import PreparationExit, Prepared, PromptSet
from tlt.spec.config import JobSpec

MODEL = Path(task.__file__).parent / "model"
JOB = JobId("job-1")
# of the two held-out prompts
WEIGHTS = sum(map(math.prod, read_folder_shapes(MODEL).values()))
SIZE = {"policy_weights": WEIGHTS, "trained_weights": WEIGHTS}
ONE_SET = (PromptSet(name="eval", prompts=2),)
PREPARED = Prepared(train_prompts=3, eval_prompts=2, eval_sets=ONE_SET)


@pytest.fixture
async def preparer() -> AsyncGenerator[Preparer]:
    made = Preparer(ranks=1)
    yield made
    await made.close()


async def test_refuses_a_folder_that_cannot_be_written(
    preparer: Preparer, spec: JobSpec, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert await preparer.prepare(JOB, spec, folder) == JobRefused(
        job=JOB, error=f"{folder}: cannot be written: Not a directory"
    )


async def test_refuses_a_job_whose_engines_need_more_ranks_than_a_worker_has(
    preparer: Preparer, spec: JobSpec, tmp_path: Path
) -> None:
    rollout = msgspec.structs.replace(spec.rollout, engine="sglang", tensor_parallel=2)
    refused = await preparer.prepare(JOB, msgspec.structs.replace(spec, rollout=rollout), tmp_path)
    assert isinstance(refused, JobRefused)
    assert "rollout.tensor_parallel: 2 needs workers of 2 ranks" in refused.error


async def test_refuses_a_job_whose_preparation_ends_without_a_result(
    preparer: Preparer, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os, sys\nprint('first\\nlast', file=sys.stderr, flush=True)\nos._exit(4)\n"
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert await preparer.prepare(JOB, spec, tmp_path / "run") == JobRefused(
        job=JOB, error="preparing ended with 4: last"
    )


def _answer_at_once(result: Prepared | str) -> str:
    """Return code for a process that imports nothing and says that it prepared this."""
    line = msgspec.json.encode(PreparationExit(code=0, result=result, last_line="")).decode()
    return f"import os\nprint({line!r}, flush=True)\nos._exit(0)\n"


async def test_prepares_again_when_the_process_is_killed(
    preparer: Preparer, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = tmp_path / "kills"
    kills.write_text("xx")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib, signal\n"
        f"kills = pathlib.Path({str(kills)!r})\n"
        "if left := kills.read_text():\n"
        "    kills.write_text(left[1:])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n" + _answer_at_once(PREPARED)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert isinstance(await preparer.prepare(JOB, spec, tmp_path / "run"), JobPrepared)
    kills.write_text("xxx")
    await preparer.close()
    refused = await preparer.prepare(JOB, spec, tmp_path / "run")
    assert isinstance(refused, JobRefused)
    assert "preparing ended with -9" in refused.error


async def test_restarts_a_process_that_prints_no_result(
    preparer: Preparer, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "sitecustomize.py"
    site.write_text("print('hello', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert await preparer.prepare(JOB, spec, tmp_path / "run") == JobRefused(
        job=JOB, error="preparing ended with -9: its reply is unreadable"
    )
    site.write_text(_answer_at_once(PREPARED))
    outcome = await preparer.prepare(JOB, spec, tmp_path / "run")
    assert isinstance(outcome, JobPrepared)


@pytest.mark.parametrize(
    ("result", "outcome"),
    [
        (
            PREPARED,
            JobPrepared(job=JOB, prepared=PREPARED),
        ),
        ("why", JobRefused(job=JOB, error="why")),
    ],
)
async def test_reports_the_result_of_the_process(
    result: Prepared | str,
    outcome: JobPrepared | JobRefused,
    preparer: Preparer,
    spec: JobSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(_answer_at_once(result))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert await preparer.prepare(JOB, spec, tmp_path / "run") == outcome


async def test_prepares_jobs_in_isolation(
    preparer: Preparer, spec: JobSpec, tmp_path: Path
) -> None:
    def with_code(name: str, code: str) -> JobSpec:
        file = tmp_path / f"{name}.py"
        file.write_text(f"{code}\ndef reward(**_):\n    return 1\n")
        reward = msgspec.structs.replace(spec.reward, function=f"{file}:reward")
        return msgspec.structs.replace(spec, reward=reward)

    started = tmp_path / "started"
    speaks = (
        "import builtins, os\nprint('{}', flush=True)\nos.system('echo {}')\n"
        "assert not hasattr(builtins, 'left')\nbuiltins.left = 1"
    )
    ends = "import os\nprint('printed\\nlast', flush=True)\nos._exit(3)"
    never = (
        f"import os, time\nfile = open({str(started)!r}, 'w')\n"
        "file.write(os.readlink('/proc/self/ns/pid'))\nfile.close()\ntime.sleep(1e6)"
    )
    good = JobPrepared(
        job=JOB,
        prepared=Prepared(
            train_prompts=3, eval_prompts=2, longest_prompt=7, eval_sets=ONE_SET, **SIZE
        ),
    )
    await preparer.warm_up()
    process = preparer.process
    assert process is not None

    folder = tmp_path / "run"
    for _ in range(2):
        assert await preparer.prepare(JOB, with_code("speaks", speaks), folder) == good
    refused = JobRefused(job=JOB, error="the reward's process ended while it loaded: last")
    assert await preparer.prepare(JOB, with_code("ends", ends), folder) == refused
    assert await preparer.prepare(JOB, spec, folder) == good
    assert preparer.process is process

    hangs = asyncio.create_task(preparer.prepare(JOB, with_code("never", never), folder))
    await wait_until(lambda: started.exists() and started.read_text().endswith("]"))
    hangs.cancel()
    await wait_until(lambda: not is_inhabited(started.read_text()))
    assert await preparer.prepare(JOB, spec, folder) == good
    assert preparer.process is not process
