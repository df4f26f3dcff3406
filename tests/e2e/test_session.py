"""Commands from another shell do what their help describes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.live import Live, wait_until
from tests.tensorboard_files import points
from tlt.base.log_rotation import MOST_BYTES
from tlt.session.fault_log import read_supervised

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def said(live: Live, spec: Path) -> str:
    """Wait for a job, and return what the command prints."""
    return live.tlt("submit", str(spec), "--wait", "--set", "loggers=[tensorboard]").stdout


@pytest.fixture(scope="module")
def finished(said: str) -> str:
    assert "done" in said
    return said.split()[1]


def test_runs_a_job_to_its_end(live: Live, finished: str) -> None:
    snapshot = live.fold(finished)
    assert snapshot.status == "done"
    assert snapshot.version == 2
    assert [step.rollouts for step in snapshot.steps] == [32, 32]
    assert [done.step for done in snapshot.evals] == [0, 2]
    assert live.job(finished)["status"] == "done"


def test_logs_figures_to_tensorboard(live: Live, finished: str) -> None:
    run = live.runs / finished
    wait_until(lambda: ("run/seconds", 2) in points(run), "the last report", 30)
    assert [points(run)["train/reward", step] for step in range(3)] == [1, 1, 0]
    assert points(run)["eval/reward", 2] == 1


@pytest.fixture(scope="module")
def exported(live: Live, finished: str) -> Path:
    folder = live.home / "exported"
    live.tlt("export", "policy", finished, str(folder))
    return folder


def test_exports_a_policy_that_transformers_loads(
    live: Live, finished: str, exported: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokens = AutoTokenizer.from_pretrained(exported)("12+01=", return_tensors="pt")
    assert model(**tokens).logits.isfinite().all()
    again = live.tlt("export", "policy", finished, str(exported), code=2)
    assert "exists already" in again.stderr


def test_scores_a_policy_folder_with_the_spec(
    live: Live, finished: str, spec: Path, exported: Path
) -> None:
    scored = live.json("eval", str(spec), "--policy", str(exported))
    assert scored["problems"] == 8
    # the noise of evaluations repeats
    assert scored["mean"] == live.fold(finished).evals[-1].mean
    assert live.job(scored["job"])["status"] == "done"


def test_a_wait_ends_with_the_report_that_the_demo_prints(said: str) -> None:
    for line in ("seconds by phase", "seconds by duty", "reward  ", "length  ", "summary  "):
        assert line in said


def test_a_job_that_nobody_waits_for_any_more_goes_on_and_leaves_a_summary_and_a_plot(
    live: Live, long_spec: Path
) -> None:
    endless = ("--set", "algorithm.steps=1000")
    process = live.start("submit", str(long_spec), "--wait", *endless)
    assert process.stdout is not None
    job = process.stdout.readline().split()[1]
    live.await_phase(job, "rollout")
    try:
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=30)
        assert process.returncode == 130
        assert f"{job} runs on" in complaint
        live.await_phase(job, "rollout", step=live.fold(job).step + 1)
    finally:
        live.tlt("cancel", job)
    summary = live.runs / job / "summary.json"
    wait_until(summary.exists, "a summary")
    assert json.loads(summary.read_text())["status"] == "cancelled"
    assert summary.with_name("progress.png").read_bytes().startswith(b"\x89PNG")


def test_imports_neither_torch_nor_ray_for_light_commands(live: Live) -> None:
    """Light commands stay under a second because of that."""
    for command in ("status", "jobs"):
        live.tlt(command)
    probe = (
        "import sys, cli.main; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_refuses_a_second_up(live: Live) -> None:
    assert "already up" in live.tlt("up", code=2).stderr


def test_shows_workers_and_their_ranks(live: Live) -> None:
    def ranks() -> list[int]:
        return [len(worker["rank_pids"]) for worker in live.json("status")["workers"].values()]

    wait_until(lambda: ranks() == [2, 2], "four ranks")
    assert "w0" in live.tlt("status").stdout


def test_keeps_its_logs_small(live: Live) -> None:
    folder = live.home / "tlt" / "sessions" / "default"
    large = [folder / part / "large.log" for part in ("logs", "redis")]
    for log in large:
        with open(log, "wb") as file:
            file.truncate(MOST_BYTES + 1)
    wait_until(lambda: all(log.stat().st_size == 0 for log in large), "logs to be bounded")
    for log in large:
        older = log.with_name("large.log.1")
        assert older.stat().st_size == MOST_BYTES + 1
        older.unlink()
        log.unlink()
    daemon = read_supervised(folder).processes["Ray's GCS"]
    environment = Path(f"/proc/{daemon.pid}/environ").read_bytes().split(b"\0")
    assert f"RAY_ROTATION_MAX_BYTES={MOST_BYTES}".encode() in environment
