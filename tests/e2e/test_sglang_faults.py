"""Faults that jobs on SGLang survive as jobs on the native engine do; `make test-all` runs them."""

import signal
from pathlib import Path

import pytest

from tests.e2e.live import Live, counted_rollouts, kill, pid_of, redis_pid, wait_until
from tests.e2e.test_speculation import write_drafter
from tlt.base.strategies import Draft
from tlt.protocol.events import DecodingReported, DrafterRefused
from tlt.runs.run_folder_reader import open_ledger

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_survives_a_rank_that_dies_in_an_update(alone: Live, sglang_spec: Path) -> None:
    before = set(Path("/dev/shm").glob("sglang_*"))
    job = alone.submit(sglang_spec, "algorithm.microbatch_tokens=1", "algorithm.checkpoint_every=1")
    alone.await_phase(job, "policy_update", step=1)
    kill(alone.workers()["w0"].rank_pids[0])
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    counted = counted_rollouts(alone.journal(job), open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4
    assert alone.fold(job).losses == 1
    # the killed rank could not tidy up
    assert [path for path in Path("/dev/shm").glob("sglang_*") if path not in before] == []


@pytest.mark.parametrize("process", ["worker", "coordinator", "reward", "redis"])
def test_survives_the_death_of_any_process(alone: Live, sglang_spec: Path, process: str) -> None:
    alone.await_workers(1)
    job = alone.submit(sglang_spec)
    alone.await_phase(job, "rollout", step=1)
    worker = alone.workers()["w0"].pid
    match process:
        case "worker":
            kill(worker)
            wait_until(lambda: alone.workers()["w0"].pid != worker, "Ray to start w0 again")
        case "redis":
            kill(redis_pid(alone))
        case _:
            kill(pid_of(alone, process))
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    counted = counted_rollouts(alone.journal(job), open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4


def test_refuses_a_worker_that_slept_through_its_lease(alone: Live, sglang_spec: Path) -> None:
    alone.await_workers(1)
    sleeper = alone.workers()["w0"]
    job = alone.submit(sglang_spec)
    alone.await_phase(job, "rollout", step=1)
    kill(sleeper.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: alone.fold(job).losses > 0, "the lease to end")
    finally:
        kill(sleeper.pid, signal.SIGCONT)
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    counted = counted_rollouts(alone.journal(job), open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4
    assert alone.workers()["w0"].incarnation > sleeper.incarnation


@pytest.mark.parametrize("wrong", ["torn", "unfit"])
def test_goes_without_a_drafter_that_cannot_be_used(
    alone: Live, sglang_spec: Path, policy: Path, tmp_path: Path, wrong: str
) -> None:
    if wrong == "torn":
        folder = write_drafter(policy, tmp_path / "drafter")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        folder = write_drafter(policy, tmp_path / "drafter", vocabulary=99)
    job = alone.submit(sglang_spec, "drafter.train=off", f"drafter.path={folder}")
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    events = [entry.event for entry in alone.journal(job)]
    [refused] = [event for event in events if isinstance(event, DrafterRefused)]
    assert ("safetensors" if wrong == "torn" else "vocabulary") in refused.error
    tallies = [t for e in events if isinstance(e, DecodingReported) for t in e.tallies]
    assert tallies
    assert not any(isinstance(tally.strategy, Draft) for tally in tallies)
