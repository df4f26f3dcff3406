"""Walk at random through the simulated world, with and without faults."""

import os
from collections.abc import Callable, Mapping
from random import Random

from msgspec import UNSET

from tests.simulation.specs import small_spec
from tests.simulation.world import Decide, World
from tlt.policies.run import coordinator

# far more moves than any of these jobs needs without faults
MOST_DELIVERIES = 3000
# histories that once failed
_NAMED_SEEDS = (
    5002315,  # a version that is made again after its checkpoint
    2927606289,  # a lost worker that serves another job once the paused one goes on
    3963772878,  # a report that comes again once speculation is tried again
    736165709,  # a late loss of ranks that the run has never heard of
    230486543,  # ranks that join while the job is paused
    642313784,  # a last report of a batch that was closed and could not be replayed
)
# ways not to wait for a step's last answers
_NO_END: Mapping[str, float] = {}
EARLY_ENDS = (_NO_END, {"partial": 0.5}, {"partial": 1.0}, {"defer_long": 0.5}, {"staleness": 1})
TRAINING_MOVES = ("train", "send_delta", "merge", "stop_rank")


def random_world(
    chooser: Random, decide: Decide = coordinator.decide, early_end: Mapping[str, float] = _NO_END
) -> World:
    # the seed decides about these, so that the other choices stay as they are
    spec = small_spec(
        steps=chooser.randint(1, 4),
        prompts=chooser.randint(1, 2),
        group=chooser.randint(2, 3),
        minibatches=chooser.randint(1, 2),
        checkpoint_every=chooser.randint(1, 4),
        eval_every=chooser.choice([0, 0, 1, 2]),
        max_tries=chooser.randint(1, 3),
        train=chooser.choice(["off", "auto", "auto", "always"]),
        merge_every=chooser.choice([1, 8, "auto"]),
        seed=(seed := chooser.randint(0, 6)),
        shards="all" if seed >= 5 else 1,
        dynamic_sampling=seed % 2 == 1,
        max_num_gen_batches=1.5 + seed / 4,
        skip_solved_epochs=seed % 3,
        workers=UNSET if seed % 2 else 1,
        **early_end,
    )
    ranks = [chooser.randint(1, 2) for _ in range(chooser.randint(1, 3))]
    return World(spec, ranks, decide, speedup=chooser.choice([0.5, 2.0]))


def walk(
    chooser: Random, decide: Decide = coordinator.decide, early_end: Mapping[str, float] = _NO_END
) -> World:
    """Inject faults and repeated and reordered events for a while, then let the job end."""
    world = random_world(chooser, decide, early_end)
    faults = chooser.choice([0.0, 0.02, 0.05, 0.15])
    overtaking = chooser.choice([0.0, 0.3])
    for _ in range(chooser.randint(20, 400)):
        if world.ended:
            break
        step(world, chooser, faults, overtaking)
    finish(world)
    return world


def corpus() -> dict[int, World]:
    """Return finished walks by their seeds; HYPOTHESIS_PROFILE=random asks for other seeds."""
    fresh = os.environ.get("HYPOTHESIS_PROFILE") == "random"
    chooser, count = (Random(), 1000) if fresh else (Random(0), 120)
    seeds = [*_NAMED_SEEDS, *(chooser.getrandbits(32) for _ in range(count))]
    return {seed: _walk_from(seed) for seed in seeds}


def holds_of_every_walk(check: Callable[[World], None]) -> Callable[[dict[int, World]], None]:
    """Make a test of the fixture `walks` from a check of one of them."""

    def test(walks: dict[int, World]) -> None:
        for seed, world in walks.items():
            try:
                check(world)
            except Exception as failure:
                failure.add_note(f"the walk's seed is {seed}")
                raise

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return test


def _walk_from(seed: int) -> World:
    try:
        early_end = _NO_END if seed in _NAMED_SEEDS else EARLY_ENDS[seed % len(EARLY_ENDS)]
        return walk(Random(seed), early_end=early_end)
    except Exception as failure:
        failure.add_note(f"the walk's seed is {seed}")
        raise


def step(world: World, chooser: Random, faults: float, overtaking: float) -> None:
    moves = world.moves()
    micro_batches = [move for move in moves if move.kind in TRAINING_MOVES]
    if micro_batches and chooser.random() < 0.5:
        moves = micro_batches  # answers take long enough to train meanwhile
    failing = not moves or chooser.random() < faults
    move = chooser.choice(world.faults() if failing else moves)
    if move.kind == "deliver" and chooser.random() < overtaking:
        world.deliver(chooser.choice(world.deliverable()))
    else:
        world.do(move)
    if chooser.random() < 0.1:
        world.expect_nothing(chooser.choice(world.delivered))


def finish(world: World) -> None:
    world.calm()
    world.run_out(MOST_DELIVERIES)
    assert world.status == "done"
    assert world.replay() == world.state
    world.checks.check_end()
