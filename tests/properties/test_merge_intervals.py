"""Members train until a merge like the last one is worth its cost, with `merge_every: auto`."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.drafter_training import name_of
from tests.simulation.moves import Move
from tests.simulation.training_world import DECODING, WHOLE_STEP, TrainingWorld
from tests.simulation.walk import finish
from tlt.protocol.commands import MergeDrafter
from tlt.protocol.events import DrafterDeltaReady

_BETTER, _SAME, _MUCH_WORSE = 1.3, 0.97, 0.5
_DELTAS = 20
# of one merge: seconds, and the quality of the drafter in it
_merges = st.lists(
    st.tuples(st.floats(0.01, 100.0), st.sampled_from([_BETTER, _SAME, _MUCH_WORSE])),
    min_size=_DELTAS,
    max_size=_DELTAS,
)
_micro_batch_seconds = st.floats(0.01, 10.0)


def _auto_world(micro_batch_seconds: float) -> TrainingWorld:
    world = TrainingWorld(merge_every="auto").start_training()
    world.drafter_training.micro_batch_seconds = micro_batch_seconds
    return world


def _train(world: TrainingWorld) -> float:
    """Hand in a delta; return the seconds that it took."""
    world.train_delta()
    world.settle()
    event = next(e for e in reversed(world.delivered) if isinstance(e, DrafterDeltaReady))
    return event.seconds + event.reading_seconds + event.publishing_seconds


def _train_until_merge(world: TrainingWorld) -> float:
    """Train until a merge is requested; return the seconds of training."""
    trained = _train(world)
    while world.trainee.merge is None:
        trained += _train(world)
    return trained


def _merge(world: TrainingWorld, seconds: float, quality: float) -> None:
    world.drafter_training.merge_seconds, world.drafter_training.quality = seconds, quality
    world.do(Move("merge", (world.trainee,)))
    world.settle()


def test_merges_the_first_delta() -> None:
    world = _auto_world(micro_batch_seconds=10.0)
    _train(world)
    assert world.trainee.merge is not None
    finish(world)


@given(micro_batch_seconds=_micro_batch_seconds, merges=_merges)
@settings(max_examples=30)
def test_merges_take_a_fifth_of_the_time_at_most(
    micro_batch_seconds: float, merges: list[tuple[float, float]]
) -> None:
    """The last merge is paid for by the training that follows it."""
    world, trained, paid = _auto_world(micro_batch_seconds), 0.0, list[float]()
    for seconds, quality in merges:
        trained += _train(world)
        if world.trainee.merge is not None:
            assert 4 * sum(paid) <= trained * (1 + 1e-9)
            paid.append(seconds)
            _merge(world, seconds, quality)


@given(micro_batch_seconds=_micro_batch_seconds, merges=_merges)
@settings(max_examples=30)
def test_an_evaluation_follows_after_training_as_long_as_32_merges(
    micro_batch_seconds: float, merges: list[tuple[float, float]]
) -> None:
    world, unmerged, last = _auto_world(micro_batch_seconds), 0.0, 0.0
    for seconds, quality in merges:
        unmerged += _train(world)
        assert world.trainee.merge is not None or unmerged < 32 * last
        if world.trainee.merge is not None:
            _merge(world, seconds, quality)
            unmerged, last = 0.0, seconds


def test_trains_twice_as_long_after_each_evaluation_without_a_gain() -> None:
    world, seconds = _auto_world(micro_batch_seconds=0.01), 0.05
    trained = list[float]()
    for quality in (_BETTER, _SAME, _SAME, _SAME, _SAME, _BETTER, _SAME):
        trained.append(_train_until_merge(world))
        _merge(world, seconds, quality)
    longest = 6 * 0.01 + 0.01  # of a delta
    for found, factor in zip(trained, (0, 4, 8, 16, 32, 32, 4), strict=True):
        assert factor * seconds <= found + 1e-9
        assert found <= factor * seconds + longest
    finish(world)


def test_counts_the_training_of_all_members() -> None:
    world = TrainingWorld((2, 1), merge_every="auto").start_training()
    world.train_delta(rank=0)
    world.run_until(lambda: world.trainee.merge is not None, "deliver", "obey")
    _merge(world, 10.0, _BETTER)
    world.drafter_training.micro_batch_seconds = 20.1 / 6
    for rank in (0, 1):
        assert world.trainee.merge is None
        while world.trainee.training_ranks[rank].opened < 6:
            world.do(Move("train", (world.trainee, rank)))
        world.do(Move("send_delta", (world.trainee, rank)))
        world.settle()
    assert world.trainee.merge is not None
    finish(world)


def test_merges_in_a_later_step_what_was_trained_before() -> None:
    world = _auto_world(micro_batch_seconds=1.0)
    _train(world)
    _merge(world, 10.0, _BETTER)
    _train(world)
    (delta,) = world.state.drafter.lineage.deltas
    before = world.state.drafter.lineage.unmerged_seconds
    assert 0.0 < before < 40.0
    world.run_until(lambda: world.state.step == 1, *WHOLE_STEP)
    second = world.incarnations[DECODING]
    world.run_until(lambda: bool(second.held), *WHOLE_STEP, but=DECODING)
    world.run_until(lambda: world.trainee.training_session is not None, *WHOLE_STEP, but=DECODING)
    trained = _train_until_merge(world)
    assert world.state.step == 1
    assert trained < 40.0 <= before + trained
    (*_, request) = [c for c in world.commands if isinstance(c, MergeDrafter)]
    merged = {part for d in request.deltas for part in world.drafter_training.contents[name_of(d)]}
    assert name_of(delta) in merged
    finish(world)
