"""Blobs that the state names are kept, and all others are discarded."""

from typing import Any

import msgspec
import pytest

from tests.samples import JOB, SPEC
from tlt.base.id_types import Digest, DrafterVersion, Epoch, PolicyVersion
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.drafter.used_and_fallback_drafters import Adoption
from tlt.policies.run import blob_retention
from tlt.policies.run.run_state import BestPolicy, PolicyState, RunState, Turn
from tlt.protocol.commands import DiscardBlobs
from tlt.protocol.refs import BlobRef, Checkpoint, DrafterRef, PolicyRef


def _blob(name: str) -> BlobRef:
    return BlobRef(digest=Digest(name), bytes=1)


def _drafter(name: str) -> DrafterRef:
    return DrafterRef(
        version=DrafterVersion(1),
        weights=_blob(name),
        policy=PolicyVersion(0),
        architecture=Digest("shape"),
        updates=1,
        micro_batches=1,
    )


def _policy(name: str) -> PolicyRef:
    return PolicyRef(version=PolicyVersion(3), weights=_blob(name))


NAMED = ("policy", "previous", "best", "checkpoint", "optimiser", "used", "before")


def _turn(**changes: Any) -> Turn:
    spec = msgspec.structs.replace(SPEC, **changes)
    state = RunState(
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        train_prompts=8,
        eval_sets=(),
        policy=PolicyState(
            current=_policy("policy"),
            previous=_policy("previous"),
            best=BestPolicy(version=PolicyVersion(1), mean=0.5, weights=_blob("best")),
            checkpoint=Checkpoint(
                version=PolicyVersion(2), weights=_blob("checkpoint"), optimiser=_blob("optimiser")
            ),
        ),
        drafter=DrafterState(adoption=Adoption(used=_drafter("used"), fallback=_drafter("before"))),
    )
    return Turn(state, 0.0)


@pytest.mark.parametrize("name", NAMED)
def test_keeps_blobs_that_the_state_names(name: str) -> None:
    turn = _turn()
    blob_retention.discard(turn, _blob(name), None)
    blob_retention.discard_drafters(turn, _drafter(name), None)
    assert turn.commands == []


def test_discards_all_other_blobs() -> None:
    turn = _turn()
    blob_retention.discard(turn, _blob("old"), _blob("policy"), _blob("old"))
    blob_retention.discard_drafters(turn, _drafter("older"))
    assert turn.commands == [
        DiscardBlobs(job=JOB, blobs=(_blob("old"),)),
        DiscardBlobs(job=JOB, blobs=(_blob("older"),)),
    ]


def test_keep_all_keeps_all_blobs() -> None:
    turn = _turn(
        algorithm=msgspec.structs.replace(SPEC.algorithm, keep_all=True),
        drafter=msgspec.structs.replace(SPEC.drafter, keep_all=True),
    )
    blob_retention.discard(turn, _blob("old"))
    blob_retention.discard_drafters(turn, _drafter("older"))
    assert turn.commands == []


def test_an_ended_job_keeps_what_its_state_names() -> None:
    kept = blob_retention.blobs_of_ended(_turn().state)
    assert kept == {_blob(name) for name in NAMED}


@pytest.mark.parametrize("section", ["algorithm", "drafter"])
def test_an_ended_job_keeps_everything_if_its_spec_says_so(section: str) -> None:
    changed = msgspec.structs.replace(getattr(SPEC, section), keep_all=True)
    assert blob_retention.blobs_of_ended(_turn(**{section: changed}).state) is None
