"""Two jobs run at once, each on a worker of its own, as if the other one weren't there."""

import signal
from pathlib import Path

import pytest

from tests.e2e.live import Live, counted_rollouts, kill, pid_of
from tlt.runs.run_folder_reader import open_ledger
from tlt.session.job_submission import submit_job
from tlt.spec.spec_files import load_job_spec

pytestmark = pytest.mark.timeout(240)


def test_two_jobs_at_once_have_the_rewards_of_each_alone(
    live: Live, long_spec: Path, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is killed meanwhile; a job that asks for both workers waits for both jobs."""
    monkeypatch.setenv("TLT_HOME", live.environment["TLT_HOME"])
    live.await_workers(2)

    def submit(spec: Path, *changes: str) -> str:
        # commands of their own would take longer than the jobs
        return submit_job("default", load_job_spec(spec, list(changes))).job

    one_worker = ("workers.count=1", "rollout.max_new_tokens=240")
    alone: list[str] = []
    for seed in (3, 4):
        alone.append(submit(long_spec, *one_worker, f"seed={seed}"))
        live.await_end(alone[-1])

    beside = [submit(long_spec, *one_worker, f"seed={seed}") for seed in (3, 4)]
    both = submit(spec, "workers.count=2", "algorithm.steps=1", "algorithm.eval_every=0")
    for job in beside:
        live.await_phase(job, "rollout")
    kill(pid_of(live, "coordinator"), signal.SIGKILL)
    for job in (*beside, both):
        assert live.await_end(job)["status"] == "done"

    first, second, last = (live.journal(job) for job in (*beside, both))
    assert max(first[0].at, second[0].at) < min(first[-1].at, second[-1].at)
    assert last[0].at >= max(first[-1].at, second[-1].at)
    workers = [set(live.fold(job).workers) for job in (*beside, both)]
    assert [len(each) for each in workers] == [1, 1, 2]
    assert workers[0] | workers[1] == workers[2]
    for job, undisturbed in zip(beside, alone, strict=True):
        expected, found = live.fold(undisturbed), live.fold(job)
        assert [step.reward for step in found.steps] == [step.reward for step in expected.steps]
        counted = counted_rollouts(live.journal(job), open_ledger(live.runs / job))
        assert len(counted) == len(set(counted)) == 2 * 32
        assert found.losses == 0
