"""Simulated jobs lose nothing, and what the product has is simulated by `decide`."""

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.simulation.specs import small_spec
from tlt.policies.speculation.plain_replay import replay
from tlt.simulation import product_scheduler
from tlt.simulation.answer_groups import Group
from tlt.simulation.comparison import simulate
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import (
    Curve,
    DraftCosts,
    EngineCosts,
    Inputs,
    LengthSpec,
    UpdateCosts,
)
from tlt.simulation.job import Job, Mode, rollout_seconds
from tlt.simulation.product_scheduler import ProductScheduler
from tlt.simulation.world import Finished, World

PLAIN: Curve = {1: 1.0, 4: 1.5, 16: 4.0}
DRAFT = DraftCosts(seconds={1: 1.5, 4: 3.0, 16: 16.0}, tokens={1: 4.0, 16: 3.0})


def job_of(
    workers: int = 3,
    steps: int = 4,
    prompts: int = 6,
    slots: int = 4,
    engine: EngineCosts | None = None,
) -> Job:
    spec = small_spec(prompts=prompts, group=3, train="auto")
    spec = replace(spec, rollout=replace(spec.rollout, slots=slots, max_new_tokens=400))
    engine = engine or EngineCosts(plain=PLAIN, cached_token=1e-3, prefill_token=1e-2)
    inputs = Inputs(
        lengths=LengthSpec(median=40.0, sigma=1.0),
        engine=engine,
        drafts=(DRAFT,),
        update=UpdateCosts(token=0.05, seconds=3.0),
    )
    return Job(spec=spec, inputs=inputs, workers=workers, steps=steps)


surpluses = st.sampled_from([0.2, 0.5, 1.0])
decided = (
    st.just(Mode())
    | st.builds(lambda surplus: Mode(partial=surplus), surpluses)
    | st.builds(lambda surplus: Mode(defer_long=surplus), surpluses)
    | st.just(Mode(ahead=True))
)


@st.composite
def jobs(draw: st.DrawFn, modes: st.SearchStrategy[Mode] = decided) -> Job:
    workers, steps = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    job = job_of(workers, steps, prompts=draw(st.integers(1, 6)), slots=draw(st.integers(1, 8)))
    mode = replace(draw(modes), speculates=draw(st.booleans()))
    return replace(job, mode=mode, seed=draw(st.integers(0, 99)))


def run_product(job: Job) -> tuple[World, ProductScheduler]:
    world = job.world()
    scheduler = ProductScheduler(job, world)
    while scheduler.trained.steps < job.steps:
        scheduler.handle(world.next())
    return world, scheduler


def drawn(job: Job, learned: list[int]) -> list[Group]:
    """Return the groups up to the last one that was learned from."""
    return list(islice(job.groups(), max(learned) + 1))


@given(jobs(st.just(Mode(ahead=True))))
def test_the_first_of_two_batches_takes_as_long_as_without_the_second(job: Job) -> None:
    job = replace(job, steps=1)
    two, learned = simulate(job)
    one, expected = simulate(replace(job, mode=replace(job.mode, ahead=False)))
    assert two.now == pytest.approx(one.now)
    assert sorted(learned.groups) == sorted(expected.groups)
    assert (learned.tokens, learned.older_tokens) == (expected.tokens, 0)
    for use in ("batch", "update"):
        assert two.seconds[use] == pytest.approx(one.seconds[use], abs=1e-6)


@given(jobs(st.just(Mode(ahead=True))))
def test_of_two_batches_all_but_the_first_have_older_weights(job: Job) -> None:
    _, trained = simulate(job)
    first = job.spec.algorithm.prompts_per_step
    expected = drawn(job, trained.groups)
    older = [expected[number].tokens for number in trained.groups[first:]]
    assert trained.older_tokens == sum(older)
    # in the order in which they were drawn, whichever is complete first
    learned = [sorted(trained.groups[n : n + first]) for n in range(0, len(trained.groups), first)]
    assert [number for step in learned for number in step] == list(range(len(trained.groups)))


@given(jobs())
def test_time_moves_forward_and_no_worker_decodes_more_than_its_slots(job: Job) -> None:
    world = job.world()
    scheduler = ProductScheduler(job, world)
    times: list[float] = []
    while scheduler.trained.steps < job.steps:
        happening = world.next()
        times.append(world.now)
        if isinstance(happening, Finished):
            assert happening.answer.done == happening.answer.length
        scheduler.handle(happening)
        assert all(len(worker.rows) <= job.slots for worker in world.workers)
    assert times == sorted(times)


@given(jobs())
def test_every_second_has_one_use(job: Job) -> None:
    world, _ = simulate(job)
    assert sum(world.seconds.values()) == pytest.approx(world.now * job.workers)
    assert min(world.seconds.values()) >= -1e-6 * world.now
    assert job.mode.ahead or job.mode.partial or world.seconds["ahead"] == 0.0
    assert job.mode.defer_long or world.seconds["discarded"] == 0.0


@given(jobs())
def test_learns_from_whole_groups_of_the_lengths_they_were_drawn_with(job: Job) -> None:
    world = job.world()
    scheduler = ProductScheduler(job, world)
    groups: dict[int, Group] = {}
    while scheduler.trained.steps < job.steps:
        happening, before = world.next(), len(scheduler.trained.groups)
        if isinstance(happening, Finished):
            groups[happening.answer.group.number] = happening.answer.group
        scheduler.handle(happening)
        for number in scheduler.trained.groups[before:]:
            assert all(answer.done == answer.length for answer in groups[number].answers)
    learned, tokens = scheduler.trained.groups, scheduler.trained.tokens
    expected = drawn(job, learned)
    assert tokens == sum(expected[number].tokens for number in learned)


@given(jobs())
def test_each_step_learns_from_as_many_groups_and_from_none_twice(job: Job) -> None:
    _, trained = simulate(job)
    assert len(trained.groups) == job.steps * job.spec.algorithm.prompts_per_step
    assert len(set(trained.groups)) == len(trained.groups)


@given(jobs())
def test_no_group_is_lost(job: Job) -> None:
    _, scheduler = run_product(job)
    waiting = [group.number for group in scheduler.groups.values()]
    found = Counter(scheduler.trained.groups) + Counter(waiting)
    assert found == Counter(range(len(found)))


@given(jobs())
def test_a_seed_gives_the_same_results(job: Job) -> None:
    (first, learned), (second, again) = simulate(job), simulate(job)
    assert (first.now, first.seconds, learned) == (second.now, second.seconds, again)


def token_a_second(job: Job, surplus: str) -> Job:
    """Return a job whose seconds count tokens: a worker has one slot, without speculation."""
    mode = Mode(partial=0.5) if surplus == "partial" else Mode(defer_long=0.5)
    sized = job_of(job.workers, job.steps, slots=1, engine=EngineCosts(plain={1: 1.0}))
    inputs = replace(sized.inputs, update=UpdateCosts(seconds=2.0))
    return replace(sized, inputs=inputs, mode=mode, seed=job.seed)


@given(jobs())
def test_resumed_answers_keep_their_tokens(job: Job) -> None:
    job = token_a_second(job, "partial")
    world, scheduler = run_product(job)
    waiting = [answer for group in scheduler.groups.values() for answer in group.answers]
    tokens = scheduler.trained.tokens + sum(answer.done for answer in waiting)
    # an answer that is cut off as it ends has a token left
    most_cut = job.steps * job.workers
    spent = world.seconds["batch"] + world.seconds["ahead"]
    assert spent == pytest.approx(tokens, abs=most_cut)


@given(jobs(st.builds(lambda surplus: Mode(defer_long=surplus), surpluses)))
def test_workers_drop_prompts_that_were_put_off(job: Job) -> None:
    world = job.world()
    scheduler = ProductScheduler(job, world)
    while scheduler.trained.steps < job.steps:
        scheduler.handle(world.next())
        running = [answer for worker in world.workers for _, _, answer in worker.rows]
        assert all(answer.group.step == scheduler.trained.steps for answer in running)


@given(jobs())
def test_groups_that_are_put_off_are_decoded_again_from_their_first_token(job: Job) -> None:
    world, scheduler = run_product(token_a_second(job, "defer_long"))
    assert world.seconds["batch"] == pytest.approx(scheduler.trained.tokens)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=40, unique=True),
    st.integers(1, 4),
    st.integers(1, 16),
)
def test_a_batch_takes_as_long_as_its_replay(lengths: list[int], workers: int, slots: int) -> None:
    """Ends at the same time may take prompts in another order, so there are none."""
    costs: Curve = {knot: 0.5 + 0.2537 * knot for knot in (1, 2, 4, 8, 16)}
    job = job_of(workers, slots=slots, engine=EngineCosts(plain=costs))
    replayed = replay(lengths, workers, slots, lambda rows: 0.5 + 0.2537 * rows)
    expected = sum(costs[knot] * count for knot, count in replayed.last.items())
    assert rollout_seconds(job, [lengths]) == pytest.approx(expected)


@given(jobs())
def test_drafts_that_gain_nothing_change_nothing(job: Job) -> None:
    useless = DraftCosts(seconds=PLAIN, tokens={1: 1.0})
    job = replace(job, inputs=replace(job.inputs, drafts=(useless,)))
    seconds = [
        simulate(replace(job, mode=replace(job.mode, speculates=speculates)))[0].now
        for speculates in (False, True)
    ]
    assert seconds[0] == seconds[1]


@given(
    st.integers(1, 64), st.floats(0.0, 1e6), st.floats(0.1, 5e4), st.sampled_from([0.0, 1e-8, 1e-3])
)
def test_tokens_and_seconds_are_each_others_inverse(
    rows: int, cached: float, tokens: float, cached_token: float
) -> None:
    speed = EngineSpeed(EngineCosts(plain=PLAIN, cached_token=cached_token), [DRAFT])
    pace = speed.pace(rows, cached)
    seconds = speed.seconds(pace, rows, cached, tokens)
    assert speed.tokens(pace, rows, cached, seconds) == pytest.approx(tokens)


def test_speculates_with_few_rows_only() -> None:
    speed = EngineSpeed(EngineCosts(plain=PLAIN), [DRAFT])
    assert speed.pace(1, 0.0) == (4.0, 1.5)
    assert speed.pace(16, 0.0) == (1.0, 4.0)


def test_an_answer_in_a_long_cache_gains_more_by_speculation() -> None:
    """The cache is read once a step, for all tokens that the step verifies."""
    speed = EngineSpeed(EngineCosts(plain=PLAIN, cached_token=1e-2), [DRAFT])
    assert speed.pace(16, 0.0).tokens == 1.0
    assert speed.pace(16, 10_000.0).tokens == 3.0


def _one_slow_group(mode: Mode) -> tuple[World, list[int]]:
    """Simulate steps of two groups, of which every third group is a hundred times as long."""
    lengths = ((10, 10, 10), (10, 10, 10), (1000, 1000, 1000))
    job = job_of(workers=3, steps=12, prompts=2, engine=EngineCosts(plain={1: 1.0}))
    job = replace(job, inputs=replace(job.inputs, lengths=lengths, update=UpdateCosts()), mode=mode)
    world, trained = simulate(job)
    return world, trained.groups


def test_deferred_groups_are_learned_from_in_a_long_batch() -> None:
    waited, _ = _one_slow_group(Mode())
    deferred, groups = _one_slow_group(Mode(defer_long=0.5))
    assert any(new < old for old, new in pairwise(groups))
    assert deferred.seconds["discarded"] > 0.0
    assert deferred.now < waited.now


def test_steps_go_on_with_answers_that_were_cut() -> None:
    waited, _ = _one_slow_group(Mode())
    resumed, groups = _one_slow_group(Mode(partial=0.5))
    assert any(new < old for old, new in pairwise(groups))
    assert resumed.seconds["ahead"] > 0.0
    assert resumed.now < waited.now


def test_idle_workers_decode_the_next_batch() -> None:
    waited, _ = _one_slow_group(Mode())
    ahead, _ = _one_slow_group(Mode(ahead=True))
    assert ahead.seconds["ahead"] > 0.0
    assert ahead.now < waited.now


@pytest.mark.parametrize(
    "mode", [Mode(), Mode(partial=0.5), Mode(ahead=True)], ids=["whole", "cut", "ahead"]
)
def test_a_step_of_4096_workers_takes_a_few_events_for_each_answer(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()
    decide, happen = product_scheduler.decide, World.next
    monkeypatch.setattr(
        product_scheduler, "decide", lambda *a: calls.update(["decide"]) or decide(*a)
    )
    monkeypatch.setattr(World, "next", lambda world: calls.update(["next"]) or happen(world))
    workers = 4096
    job = replace(job_of(workers, steps=1, prompts=2 * workers // 3, slots=2), mode=mode)
    world, _ = run_product(job)
    answers = job.mode.spec_of(job.spec).issued_answers
    assert world.ended >= job.spec.algorithm.answers_per_step
    if mode.ahead:
        # so many are decoded before the step ends, and some of them are cut
        answers, workers = 2 * answers, 2 * workers
    assert calls["next"] <= answers + workers + 1
    assert calls["decide"] <= 2 * answers + 2 * workers + 2
