"""Long work shows progress, because a rank without progress counts as dead."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.ranks.ranks import INCARNATION, WORKER, rank_job, shared_progress
from tests.samples import JOB
from tests.waiting import wait_until
from tlt.base.id_types import Attempt, Digest, Epoch, PolicyVersion, Step
from tlt.errors import RankError
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.refs import BlobRef, Checkpoint
from tlt.protocol.shared_values import UpdateMetrics
from tlt.ranks import policy_files, policy_update
from tlt.ranks.policy_update import PolicyUpdateDuty
from tlt.ranks.worker_channel import Progress

UPDATE = UpdatePolicy(
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
BLOB = BlobRef(digest=Digest("0" * 40), bytes=1)
METRICS = UpdateMetrics(**dict.fromkeys(UpdateMetrics.__struct_fields__, 0))


@pytest.fixture
def progress() -> Iterator[Progress]:
    with shared_progress() as found:
        yield found


def waits_for(progress: Progress) -> Callable[..., None]:
    def wait(*_: Any, **__: Any) -> None:
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
    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *them, part: given.extend(them))
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

    monkeypatch.setattr(policy_update, "PolicyLearner", lambda *_, **__: None)
    monkeypatch.setattr(policy_update.groups, "join_group", join)
    with pytest.raises(RankError, match="no other rank joined"):
        PolicyUpdateDuty(rank_job(tmp_path), progress).run(UPDATE)


def test_shows_progress_while_weights_and_checkpoints_are_written(
    tmp_path: Path, progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a large policy takes longer to write than a stuck rank may be silent."""
    wait, written = waits_for(progress), list[str]()

    class Learner:
        is_sharded = has_adapter = False

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def update(self, *_: Any) -> UpdateMetrics:
            return METRICS

        def shapes(self) -> dict[str, torch.Size]:
            return {"weights": torch.Size([1])}

        def weights(self) -> dict[str, Tensor]:
            wait()
            written.append("weights")
            return {"weights": torch.zeros(1)}

        def optimiser_state(self) -> dict[str, Tensor]:
            return {"optimiser": torch.zeros(1)}

        def load_weights(self, _: Any) -> None:
            written.append("weights read")

        def load_optimiser_state(self, _: Any) -> None:
            written.append("optimiser read")

    def put(_: Any, tensors: Any, commit: bool) -> BlobRef:
        wait()
        written.extend(tensors)
        return BLOB

    monkeypatch.setattr(policy_update, "PolicyLearner", Learner)
    monkeypatch.setattr(policy_files, "put_weights", put)
    monkeypatch.setattr(policy_files, "read_weights", wait)
    restore = Checkpoint(version=PolicyVersion(0), weights=BLOB, optimiser=BLOB)
    command = msgspec.structs.replace(UPDATE, world=1, checkpoint=True, restore=restore)
    PolicyUpdateDuty(rank_job(tmp_path), progress).run(command)
    assert written == ["weights read", "optimiser read", "weights", "optimiser"]
