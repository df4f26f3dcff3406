"""Long work shows progress, because a rank without progress counts as dead."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.ranks import INCARNATION, WORKER, rank_job, shared_progress
from tests.samples import JOB
from tests.waiting import wait_until
from tlt.errors import RankError
from tlt.id_types import Attempt, Epoch, PolicyVersion, Step
from tlt.protocol.commands import UpdatePolicy
from tlt.ranks import policy_update
from tlt.ranks.policy_update import PolicyUpdateDuty
from tlt.ranks.worker_channel import Progress


@pytest.fixture
def progress() -> Iterator[Progress]:
    with shared_progress() as found:
        yield found


def waits_for(progress: Progress) -> Callable[..., None]:
    def wait(*_: Any) -> None:
        done, _ = progress.read()
        moved = wait_until(lambda: progress.read()[0] > done, message="no progress was shown")
        asyncio.run(moved)

    return wait


def test_shows_progress_while_the_trainer_is_brought_up(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_update, "PolicyLearner", waits_for(progress))
    PolicyUpdateDuty(rank_job(tmp_path), progress)


def test_lets_the_learner_show_progress(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *arguments: given.extend(arguments))
    PolicyUpdateDuty(rank_job(tmp_path), progress)
    with given[-1]():
        waits_for(progress)()


def test_shows_progress_while_other_ranks_are_awaited(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = waits_for(progress)

    def join(*_: Any) -> None:
        wait()
        raise RankError("no other rank joined")

    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *_: None)
    monkeypatch.setattr(policy_update.groups, "join_group", join)
    command = UpdatePolicy(
        worker=WORKER,
        incarnation=INCARNATION,
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        version=PolicyVersion(0),
        rendezvous="unreachable:1",
        group="g",
        world=2,
        first_rank=0,
        restore=None,
        sync_from=None,
        minibatches=(),
        checkpoint=False,
    )
    with pytest.raises(RankError, match="no other rank joined"):
        PolicyUpdateDuty(rank_job(tmp_path), progress).run(command, ())
