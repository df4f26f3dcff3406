"""Simulated jobs lose nothing, and synchronous ones are what `decide` makes of them."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.simulation.specs import small_spec
from tlt.policies.speculation.plain_replay import replay
from tlt.simulation import product_scheduler
from tlt.simulation.answer_groups import Group
from tlt.simulation.comparison import simulate
from tlt.simulation.cure_schedulers import INTAKES, Cures, CureScheduler
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.inputs import (
    Curve,
    DraftCosts,
    EngineCosts,
    Inputs,
    LengthSpec,
    UpdateCosts,
)
from tlt.simulation.product_scheduler import ProductScheduler
from tlt.simulation.scheduler import Job, rollout_seconds, run
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
    return Job(spec=spec, inputs=inputs, workers=workers, steps=steps, speculates=False)


jobs = st.builds(
    lambda workers, steps, prompts, slots, seed, speculates: replace(
        job_of(workers, steps, prompts, slots), seed=seed, speculates=speculates
    ),
    st.integers(1, 5),
    st.integers(1, 7),
    st.integers(1, 6),
    st.integers(1, 8),
    st.integers(0, 99),
    st.booleans(),
)


@st.composite
def jobs_with_cures(draw: st.DrawFn) -> tuple[Job, Cures]:
    job = draw(jobs)
    ahead = draw(st.booleans())
    cures = Cures(
        intake=draw(st.sampled_from(list(INTAKES))),
        surplus=draw(st.sampled_from([0.2, 0.5, 1.0])),
        ahead=ahead,
        learners=draw(st.integers(0, job.workers - 1)) if ahead else 0,
    )
    return job, replace(cures, surplus=0.0) if cures.intake == "whole" else cures


@given(jobs)
def test_the_model_of_synchronous_steps_agrees_with_decide(job: Job) -> None:
    product, learned = simulate(job)
    model, modelled = simulate(job, Cures())
    assert model.now == pytest.approx(product.now)
    assert sorted(modelled.groups) == sorted(learned.groups)
    assert (modelled.tokens, modelled.older_tokens) == (learned.tokens, 0)
    for use in ("batch", "ahead", "discarded", "update"):
        assert model.seconds[use] == pytest.approx(product.seconds[use], abs=1e-6)


@given(jobs_with_cures())
def test_time_moves_forward_and_no_worker_decodes_more_than_its_slots(
    case: tuple[Job, Cures],
) -> None:
    job, cures = case
    world = job.world()
    scheduler = CureScheduler(job, world, cures)
    scheduler.start()
    times: list[float] = []
    while not scheduler.done:
        happening = world.next()
        times.append(world.now)
        if isinstance(happening, Finished):
            assert happening.answer.done == happening.answer.length
        scheduler.handle(happening)
        assert all(len(worker.rows) <= job.slots for worker in world.workers)
        assert not any(worker.rows for worker in world.workers[: cures.learners])
        decoded = {worker.batch for worker in world.workers if worker.rows}
        assert len(decoded) <= 1 + cures.ahead
        assert all(
            later - earlier <= 1 for earlier, later in pairwise(sorted(filter(None, decoded)))
        )
    assert times == sorted(times)


@given(jobs_with_cures())
def test_every_second_has_one_use(case: tuple[Job, Cures]) -> None:
    job, cures = case
    world, _ = simulate(job, cures)
    assert sum(world.seconds.values()) == pytest.approx(world.now * job.workers)
    assert min(world.seconds.values()) >= -1e-6 * world.now
    assert cures.ahead or cures.intake == "resumed" or world.seconds["ahead"] == 0.0
    assert cures.intake == "deferred" or world.seconds["discarded"] == 0.0


@given(jobs_with_cures())
def test_learns_from_whole_groups_only(case: tuple[Job, Cures]) -> None:
    job, cures = case
    world = job.world()
    scheduler = CureScheduler(job, world, cures)
    scheduler.start()
    groups: dict[int, Group] = {}
    while not scheduler.done:
        happening, before = world.next(), len(scheduler.trained.groups)
        if isinstance(happening, Finished):
            groups[happening.answer.group.number] = happening.answer.group
        scheduler.handle(happening)
        for number in scheduler.trained.groups[before:]:
            assert all(answer.done == answer.length for answer in groups[number].answers)


@given(jobs_with_cures())
def test_no_group_is_lost_or_learned_from_twice(case: tuple[Job, Cures]) -> None:
    job, cures = case
    world = job.world()
    scheduler = CureScheduler(job, world, cures)
    run(world, scheduler)
    learned, size = scheduler.trained.groups, job.spec.algorithm.prompts_per_step
    assert len(set(learned)) == len(learned) == job.steps * size
    # a job ends with at most a batch ahead, and what was put back
    drawn = Counter(group.number for group in job.groups().draw(max(learned) + 1))
    waiting = Counter(group.number for group in scheduler.intake.waiting)
    missing = drawn - Counter(learned) - waiting
    assert not missing or cures.ahead
    assert not Counter(learned) & waiting


@given(jobs_with_cures())
def test_resumed_answers_keep_their_tokens(case: tuple[Job, Cures]) -> None:
    """Seconds count the tokens where a worker has one slot and a token takes a second."""
    job, cures = case
    engine = EngineCosts(plain={1: 1.0})
    job = replace(job_of(job.workers, job.steps, slots=1, engine=engine), seed=job.seed)
    job = replace(job, inputs=replace(job.inputs, update=UpdateCosts(seconds=2.0)))
    cures = replace(cures, intake="resumed", surplus=0.5, ahead=False, learners=0)
    world = job.world()
    scheduler = CureScheduler(job, world, cures)
    scheduler.start()
    tokens = 0
    while not scheduler.done:
        happening = world.next()
        if isinstance(happening, Finished):
            tokens += happening.answer.length
        scheduler.handle(happening)
    waiting = [answer for group in scheduler.intake.waiting for answer in group.answers]
    tokens += sum(answer.done for answer in waiting if answer.done < answer.length)
    # an answer that is cut off as it ends has a token left
    most_cut = job.steps * job.workers
    spent = world.seconds["batch"] + world.seconds["ahead"]
    assert spent == pytest.approx(tokens, abs=most_cut)


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


@given(jobs_with_cures())
def test_drafts_that_gain_nothing_change_nothing(case: tuple[Job, Cures]) -> None:
    job, cures = case
    useless = DraftCosts(seconds=PLAIN, tokens={1: 1.0})
    job = replace(job, speculates=True, inputs=replace(job.inputs, drafts=(useless,)))
    with_drafts, _ = simulate(job, cures)
    without, _ = simulate(replace(job, speculates=False), cures)
    assert with_drafts.now == without.now


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


def _one_slow_group(cures: Cures) -> tuple[World, list[int]]:
    """Simulate steps of two groups, of which every third group is a hundred times as long."""
    lengths = ((10, 10, 10), (10, 10, 10), (1000, 1000, 1000))
    job = job_of(workers=3, steps=12, prompts=2, engine=EngineCosts(plain={1: 1.0}))
    job = replace(job, inputs=replace(job.inputs, lengths=lengths, update=UpdateCosts()))
    world, trained = simulate(job, cures)
    return world, trained.groups


def test_deferred_groups_are_learned_from_in_a_long_batch() -> None:
    waited, _ = _one_slow_group(Cures())
    deferred, groups = _one_slow_group(Cures(intake="deferred", surplus=0.5))
    late = [new < old for old, new in pairwise(groups)]
    assert any(late)
    assert deferred.now < waited.now


def test_idle_workers_decode_the_next_batch() -> None:
    waited, _ = _one_slow_group(Cures())
    ahead, _ = _one_slow_group(Cures(ahead=True))
    assert ahead.seconds["ahead"] > 0.0
    assert ahead.now < waited.now


def test_a_step_of_4096_workers_takes_a_few_events_for_each_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = Counter[str]()
    decide, happen = product_scheduler.decide, World.next
    monkeypatch.setattr(
        product_scheduler, "decide", lambda *a: calls.update(["decide"]) or decide(*a)
    )
    monkeypatch.setattr(World, "next", lambda world: calls.update(["next"]) or happen(world))
    workers = 4096
    job = job_of(workers, steps=1, prompts=2 * workers // 3, slots=2)
    world = job.world()
    run(world, ProductScheduler(job, world))
    answers = job.spec.algorithm.answers_per_step
    assert world.ended == answers
    assert calls["next"] <= answers + workers + 1
    assert calls["decide"] <= 2 * answers + 2 * workers + 2
