"""The report of drafter training counts what was kept, dropped, discarded and refused."""

import msgspec
import pytest

from tests.samples import JOB
from tests.simulation.specs import small_spec
from tlt.base.id_types import Digest, DrafterVersion, Incarnation, PolicyVersion, WorkerId
from tlt.policies.drafter.bases_and_deltas import Lineage
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.policies.run.coordinator import new_run
from tlt.policies.run.run_state import RunState
from tlt.protocol.events import AnyEvent, DrafterDeltaReady, DrafterDiverged, DrafterRefused
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterDelta
from tlt.protocol.shared_values import TokensByOrigin
from tlt.report import Transition
from tlt.report.drafter_training import DrafterTrainingFold

W0 = WorkerId("w0")


def transition(before: RunState, event: AnyEvent, after: RunState) -> Transition:
    return Transition(before=before, event=event, after=after, commands=(), at=0.0)


def delta_ready(base: int) -> DrafterDeltaReady:
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
            previous_micro_batches=0,
        ),
        updates=2,
        tokens=TokensByOrigin(own=7),
        seconds=3.0,
        reading_seconds=0.0,
        publishing_seconds=0.0,
        median_seconds=1.0,
        longest_seconds=2.0,
        loss=1.0,
    )


@pytest.mark.parametrize(("base", "kept", "dropped"), [(4, 3.0, 0.0), (3, 0.0, 3.0)])
def test_counts_deltas_to_a_discarded_base_as_dropped(
    base: int, kept: float, dropped: float
) -> None:
    before = new_run(JOB, small_spec())
    root = DrafterVersion(4)
    restarted = DrafterBase(version=root, root=root, weights=None, updates=0, micro_batches=0)
    after = msgspec.structs.replace(before, drafter=DrafterState(lineage=Lineage(base=restarted)))
    fold = DrafterTrainingFold()
    fold.add(transition(before, delta_ready(base), after))
    training = fold.summary()
    assert training is not None
    assert (training.idle_kept, training.dropped_seconds) == (kept, dropped)


def test_lists_each_refusal_once_even_if_nothing_was_trained() -> None:
    state, fold = new_run(JOB, small_spec()), DrafterTrainingFold()
    assert fold.summary() is None
    for worker in (W0, W0, WorkerId("w1")):
        refused = DrafterRefused(
            job=JOB,
            worker=worker,
            incarnation=Incarnation(1),
            version=DrafterVersion(1),
            error="torn",
        )
        fold.add(transition(state, refused, state))
    training = fold.summary()
    assert training is not None
    assert training.refusals == ("w0: torn", "w1: torn")


def test_names_the_worker_and_the_error_of_discarded_training() -> None:
    before, fold = new_run(JOB, small_spec()), DrafterTrainingFold()
    diverged = DrafterDiverged(
        job=JOB,
        worker=W0,
        incarnation=Incarnation(1),
        training_session=1,
        base=DrafterVersion(3),
        error="it covers 10% of the policy's guesses, and covered 90%",
    )
    fold.add(transition(before, diverged, before))  # ignored, as its base is not in use any more
    assert fold.summary() is None
    after = msgspec.structs.replace(before, drafter=DrafterState())
    fold.add(transition(before, diverged, after))
    training = fold.summary()
    assert training is not None
    assert training.divergences == ("w0: it covers 10% of the policy's guesses, and covered 90%",)
