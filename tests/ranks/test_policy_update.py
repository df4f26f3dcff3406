"""What takes its time shows progress: a rank that shows none is taken for dead."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.samples import JOB, SPEC
from tests.waiting import wait_until
from tlt.blobs import Blobs
from tlt.errors import RankError
from tlt.ids import Attempt, Epoch, Incarnation, PolicyVersion, Step, WorkerId
from tlt.protocol.commands import UpdatePolicy
from tlt.ranks import policy_update
from tlt.ranks.policy_update import PolicyUpdateDuty
from tlt.ranks.worker_channel import Load, Progress, Train


@pytest.fixture
def progress() -> Iterator[Progress]:
    memory = os.memfd_create("progress")
    os.ftruncate(memory, Progress.SIZE)
    yield Progress(memory)
    os.close(memory)


def duty(folder: Path, progress: Progress) -> PolicyUpdateDuty:
    load = Load(
        job=JOB,
        epoch=Epoch(1),
        spec=SPEC,
        worker=WorkerId("worker-1"),
        incarnation=Incarnation(1),
        rank=0,
        flight=str(folder),
        committed=str(folder),
    )
    return PolicyUpdateDuty(load, torch.device("cpu"), Blobs(folder, folder), progress)


def waits_for(progress: Progress) -> Callable[..., None]:
    def wait(*_: Any) -> None:
        done, _ = progress.read()
        moved = wait_until(lambda: progress.read()[0] > done, message="no progress was shown")
        asyncio.run(moved)

    return wait


def test_bringing_up_the_trainer_shows_progress(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(policy_update, "PolicyLearner", waits_for(progress))
    duty(tmp_path, progress)


def test_the_learner_can_show_that_it_is_busy(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
):
    given: list[Any] = []
    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *arguments: given.extend(arguments))
    duty(tmp_path, progress)
    with given[-1]():
        waits_for(progress)()


def test_waiting_for_peers_shows_progress(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
):
    wait = waits_for(progress)

    def join(*_: Any) -> None:
        wait()
        raise RankError("nobody came")

    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *_: None)
    monkeypatch.setattr(policy_update.groups, "join_group", join)
    learn = UpdatePolicy(
        worker=WorkerId("worker-1"),
        incarnation=Incarnation(1),
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(0),
        version=PolicyVersion(0),
        rendezvous="nowhere:1",
        group="g",
        world=2,
        first_rank=0,
        restore=None,
        sync_from=None,
        minibatches=(),
        checkpoint=False,
    )
    with pytest.raises(RankError, match="nobody came"):
        duty(tmp_path, progress).train(Train(learn=learn, local_rank=0, samples=()))
