"""A paused job gives its workers to the next one, and later goes on as if nothing had happened."""

import signal
from pathlib import Path

import pytest

from tests.e2e.live import Live, counted_rollouts, kill, pid_of
from tlt.runs.run_folder_reader import open_ledger

pytestmark = pytest.mark.timeout(240)


def test_goes_on_after_a_pause_with_the_same_rewards(
    alone: Live, long_spec: Path, spec: Path
) -> None:
    """Another job runs meanwhile, and the coordinator is killed while the job is paused."""
    undisturbed = alone.submit(long_spec)
    paused = alone.submit(long_spec)
    other = alone.submit(spec, "algorithm.steps=1", "algorithm.eval_every=0")
    alone.await_phase(paused, "rollout", step=1)
    assert "is paused" in alone.tlt("pause", paused).stdout
    assert f"tlt resume {paused}" in alone.tlt("jobs").stdout
    kill(pid_of(alone, "coordinator"), signal.SIGKILL)
    assert alone.await_end(other)["status"] == "done"
    assert f"{paused} is paused for" in alone.tlt("status").stdout
    assert alone.fold(paused).phase.value == "paused"

    alone.tlt("resume", paused)
    assert alone.await_end(paused)["status"] == "done"
    assert "a job that has ended can't be paused" in alone.tlt("pause", paused, code=2).stderr
    expected, found = alone.fold(undisturbed), alone.fold(paused)
    assert [step.reward for step in found.steps] == [step.reward for step in expected.steps]
    counted = counted_rollouts(alone.journal(paused), open_ledger(alone.runs / paused))
    assert len(counted) == len(set(counted)) == 2 * 32
    assert found.losses == 0
