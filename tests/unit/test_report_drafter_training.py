"""What the ledger makes of the drafter's training, by hand."""

import msgspec
import pytest

from tests.samples import JOB
from tests.simulation.specs import small_spec
from tlt.ids import Digest, DrafterVersion, Incarnation, PolicyVersion, WorkerId
from tlt.policies.coordinator import new_run
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.drafter.lineage import Lineage
from tlt.protocol.events import DrafterDeltaReady, DrafterDiverged, DrafterRefused
from tlt.protocol.records import TokensByOrigin
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta
from tlt.report.drafter_training import Drafted

W0 = WorkerId("w0")


def learned(base: int) -> DrafterDeltaReady:
    return DrafterDeltaReady(
        job=JOB,
        training_session=1,
        policy=PolicyVersion(0),
        delta=DrafterDelta(
            worker=W0,
            incarnation=Incarnation(1),
            rank=0,
            number=1,
            base=DrafterVersion(base),
            blob=BlobRef(digest=Digest("delta"), bytes=1),
            micro_batches=1,
            known=0,
        ),
        updates=2,
        tokens=TokensByOrigin(own=7),
        seconds=3.0,
        reading_seconds=0.0,
        publishing_seconds=0.0,
        typical_seconds=1.0,
        longest_seconds=2.0,
        loss=1.0,
    )


@pytest.mark.parametrize(("base", "harvested", "dropped"), [(4, 3.0, 0.0), (3, 0.0, 3.0)])
def test_what_was_learned_on_a_trunk_that_was_given_up_is_not_harvested(
    base: int, harvested: float, dropped: float
) -> None:
    before = new_run(JOB, small_spec())
    root = DrafterVersion(4)
    given_up = DrafterBase(version=root, root=root, weights=None, updates=0, micro_batches=0)
    after = msgspec.structs.replace(before, drafter=DrafterState(lineage=Lineage(base=given_up)))
    drafted = Drafted()
    drafted.watch(before, learned(base), after)
    account = drafted.account()
    assert account is not None
    assert (account.harvested, account.dropped) == (harvested, dropped)


def test_who_refuses_a_drafter_is_told_of_once() -> None:
    """Where nothing is trained, too."""
    state, drafted = new_run(JOB, small_spec()), Drafted()
    assert drafted.account() is None
    for worker in (W0, W0, WorkerId("w1")):
        refused = DrafterRefused(job=JOB, worker=worker, incarnation=Incarnation(1), error="torn")
        drafted.watch(state, refused, state)
    account = drafted.account()
    assert account is not None
    assert account.refused == ("w0: torn", "w1: torn")


def test_what_is_undone_is_told_with_who_said_so_and_why() -> None:
    before, drafted = new_run(JOB, small_spec()), Drafted()
    spoiled = DrafterDiverged(
        job=JOB,
        worker=W0,
        incarnation=Incarnation(1),
        training_session=1,
        base=DrafterVersion(3),
        error="it covers 10% of the policy's guesses, and covered 90%",
    )
    drafted.watch(before, spoiled, before)  # of a trunk that is no longer there
    assert drafted.account() is None
    drafted.watch(before, spoiled, msgspec.structs.replace(before, drafter=DrafterState()))
    account = drafted.account()
    assert account is not None
    assert account.spoiled == ("w0: it covers 10% of the policy's guesses, and covered 90%",)
