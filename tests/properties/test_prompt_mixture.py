"""Every source gives its weight's share of the prompts, and goes through its own epochs."""

from collections import Counter, defaultdict
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties.test_ledger import read_snapshot
from tests.simulation.specs import small_spec
from tests.simulation.started_run import started_run
from tests.simulation.walk import finish
from tests.simulation.walk import step as walk_step
from tests.simulation.world import TRAIN_SOURCES, World
from tlt.base.id_types import PromptIndex, Step
from tlt.policies.algorithm.prompt_mixture import begin, source_of
from tlt.policies.algorithm.prompt_order import skip_solved, take
from tlt.policies.run.run_state import Phase
from tlt.protocol.refs import PromptCursor
from tlt.spec.config import JobSpec
from tlt.spec.data_and_algorithm import DataSpec, SourceSpec

# sources with their weights and sizes
mixtures = st.lists(st.tuples(st.floats(0.05, 5.0), st.integers(8, 40)), min_size=1, max_size=5)
sizes = st.integers(1, 8)


def spec_of(weights: list[float], size: int = 4, **data: object) -> JobSpec:
    sources = tuple(
        SourceSpec(path=f"{index}.jsonl", weight=weight) for index, weight in enumerate(weights)
    )
    spec = small_spec(prompts=size)
    return msgspec.structs.replace(spec, data=DataSpec(train=sources, **data))  # pyright: ignore


@given(mixture=mixtures, size=sizes, steps=st.integers(1, 60))
def test_a_source_has_its_share_within_one_prompt(
    mixture: list[tuple[float, int]], size: int, steps: int
) -> None:
    weights, rows = [weight for weight, _ in mixture], [count for _, count in mixture]
    spec = spec_of(weights, size)
    cursor, drawn = begin(spec, None, Step(0), rows), Counter[int]()
    for step in range(1, steps + 1):
        taken, cursor = take(spec, cursor, sum(rows), size)
        assert len(set(taken)) == size
        drawn.update(source_of(cursor, prompt) for prompt in taken)
        for index, weight in enumerate(weights):
            assert abs(drawn[index] - step * size * weight / sum(weights)) < 1 + 1e-9
            assert drawn[index] == cursor.sources[index].drawn


@given(
    mixture=mixtures,
    counts=st.lists(st.integers(1, 5), max_size=40),
    sort=st.sampled_from([None, "level"]),
)
def test_no_prompt_repeats_within_an_epoch_of_its_source(
    mixture: list[tuple[float, int]], counts: list[int], sort: str | None
) -> None:
    rows = [count for _, count in mixture]
    spec = spec_of([weight for weight, _ in mixture], order_by=sort)
    cursor = begin(spec, None, Step(0), rows)
    seen: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for count in counts:
        for _ in range(count):
            (prompt,), cursor = take(spec, cursor, sum(rows), 1)
            index = source_of(cursor, prompt)
            seen[index, cursor.sources[index].epoch].append(prompt)
    for (index, _), prompts in seen.items():
        assert len(set(prompts)) == len(prompts)
        first = sum(rows[:index])
        assert set(prompts) <= set(range(first, first + rows[index]))
        if sort is not None:
            assert prompts == list(range(first, first + len(prompts)))


@given(mixture=mixtures, size=sizes)
def test_a_cursor_that_was_stored_goes_on_the_same(
    mixture: list[tuple[float, int]], size: int
) -> None:
    rows = [count for _, count in mixture]
    spec = spec_of([weight for weight, _ in mixture], size)
    cursor = begin(spec, None, Step(0), rows)
    for _ in range(5):
        stored = msgspec.json.decode(msgspec.json.encode(cursor), type=PromptCursor)
        assert begin(spec, stored, Step(9), rows) == cursor
        taken, cursor = take(spec, cursor, sum(rows), size)
        assert take(spec, stored, sum(rows), size) == (taken, cursor)


def test_other_data_begins_at_the_place_of_the_step() -> None:
    spec = spec_of([3.0, 1.0], 4)
    other = begin(spec, None, Step(0), [9, 9])
    cursor = begin(spec, other, Step(5), [10, 4])
    assert [(s.drawn, s.epoch, s.position) for s in cursor.sources] == [(15, 1, 5), (5, 1, 1)]


def test_a_batch_holds_no_prompt_twice_and_takes_from_others_when_a_source_ends() -> None:
    spec = spec_of([1.0, 1.0], 4)
    cursor = begin(spec, None, Step(0), [2, 6])
    batch, cursor = take(spec, cursor, 8, 4)
    more, cursor = take(spec, cursor, 8, 4, batch)
    assert sorted((*batch, *more)) == list(range(8))


def test_solved_prompts_are_skipped_in_epochs_of_their_source() -> None:
    spec = spec_of([1.0, 1.0], 4, order_by="level", skip_solved_epochs=1)
    cursor = begin(spec, None, Step(0), [4, 8])
    taken, cursor = take(spec, cursor, 12, 4)
    assert set(taken) == {0, 1, 4, 5}
    cursor = skip_solved(spec, cursor, [PromptIndex(0), PromptIndex(4)])
    taken, cursor = take(spec, cursor, 12, 4)
    assert set(taken) == {2, 3, 6, 7}
    taken, cursor = take(spec, cursor, 12, 4)
    assert set(taken) == {1, 2, 8, 9}


def test_a_source_that_is_too_small_fails_the_job() -> None:
    state, _ = started_run(spec_of([3.0, 1.0], 4), train_sources=(2, 2))
    assert state.phase is Phase.ENDED


@settings(max_examples=max(3, settings().max_examples // 10))
@given(seed=st.integers(0, 2**32 - 1), dynamic=st.booleans())
def test_the_report_has_the_mean_reward_of_each_source(seed: int, dynamic: bool) -> None:
    spec = small_spec(steps=3, prompts=3, dynamic_sampling=dynamic, skip_solved_epochs=1)
    data = DataSpec(
        train=(SourceSpec(path="sums.jsonl", weight=2.0), SourceSpec(path="b", name="other")),
        eval="eval.jsonl",
        skip_solved_epochs=1,
    )
    world = World(msgspec.structs.replace(spec, data=data), [1, 1])
    chooser = Random(seed)
    for _ in range(chooser.randint(20, 200)):
        if not world.ended:
            walk_step(world, chooser, faults=0.05, overtaking=0.3)
    finish(world)
    rewards: defaultdict[int, defaultdict[str, list[float]]]
    rewards = defaultdict(lambda: defaultdict(list))
    for (step, purpose), answers in world.checks.batches.items():
        for answer in answers if purpose == "train" else ():
            name = "sums" if answer[2] < TRAIN_SOURCES[0] else "other"
            score = world.checks.score(answer)
            if score is not None:
                rewards[step][name].append(score)
    for step in read_snapshot(world).steps:
        expected = {name: sum(found) / len(found) for name, found in rewards[step.step].items()}
        assert step.reward_sources == pytest.approx(expected)
