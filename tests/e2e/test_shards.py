"""A job whose ranks split one copy of the policy learns as others do, whoever dies."""

from pathlib import Path

import pytest

from tests.e2e.live import Live, kill
from tlt.protocol.events import CheckpointCommitted

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
_SPLIT = "algorithm.shards=all"


def test_ranks_with_shards_learn_as_ranks_with_whole_copies(live: Live, spec: Path) -> None:
    whole, split = live.submit(spec), live.submit(spec, _SPLIT)
    for job in (whole, split):
        assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    expected, found = (live.fold(job).steps for job in (whole, split))
    for theirs, ours in zip(expected, found, strict=True):
        assert theirs.metrics is not None
        assert ours.metrics is not None
        assert ours.metrics.loss == pytest.approx(theirs.metrics.loss, abs=1e-4)
        assert ours.metrics.gradient_norm == pytest.approx(theirs.metrics.gradient_norm, rel=1e-2)
    events = [entry.event for entry in live.journal(split)]
    (saved,) = [event.checkpoint for event in events if isinstance(event, CheckpointCommitted)]
    assert saved.optimiser is None
    assert ".metadata" in saved.optimiser_shards
    assert all((live.runs / split / "blobs" / blob.digest).is_file() for blob in saved.blobs)


def test_an_update_is_made_again_where_a_rank_dies_in_it(
    live: Live, slow_update_spec: Path
) -> None:
    """The ranks start again from the checkpoint."""
    live.await_workers(2)
    job = live.submit(slow_update_spec, "algorithm.checkpoint_every=1", _SPLIT)
    live.await_phase(job, "policy_update", step=1)
    kill(live.workers()["w1"].rank_pids[1])
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    snapshot = live.fold(job)
    assert snapshot.version == 2
    assert snapshot.losses >= 1
    live.await_workers(2)


def test_all_start_again_where_one_is_lost_between_updates(live: Live, long_spec: Path) -> None:
    """Its shards are gone, and no checkpoint holds them: the first update is made again."""
    job = live.submit(long_spec, _SPLIT)
    live.await_phase(job, "rollout", step=1)
    kill(live.workers()["w1"].rank_pids[1])
    assert live.await_end(job)["status"] == "done", live.job(job)["error"]
    snapshot = live.fold(job)
    assert (snapshot.version, snapshot.losses) == (2, 1)
