"""The cursor gives every step the prompts of its epoch, each once."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tests.simulation.specs import small_spec
from tlt.base.id_types import PromptIndex, Step
from tlt.policies.algorithm.prompt_order import PromptCursor, cursor_at, skip_solved, take
from tlt.policies.keyed_random import permuted
from tlt.spec.config import JobSpec

sizes = st.integers(1, 5)


def _steps(spec: JobSpec, prompts: int, count: int) -> list[tuple[PromptIndex, ...]]:
    size, cursor = spec.algorithm.prompts_per_step, PromptCursor()
    found: list[tuple[PromptIndex, ...]] = []
    for _ in range(count):
        taken, cursor = take(spec, cursor, prompts, size)
        found.append(taken)
    return found


@given(size=sizes, more=st.integers(0, 12), seed=st.integers(0, 9))
def test_a_step_implies_its_prompts(size: int, more: int, seed: int) -> None:
    """Journals that were recorded before there was a cursor give the same prompts."""
    spec, prompts = small_spec(prompts=size, seed=seed), size + more
    for step, taken in enumerate(_steps(spec, prompts, 20)):
        epoch, index = divmod(step, prompts // size)
        positions = range(index * size, (index + 1) * size)
        assert taken == tuple(permuted(i, prompts, seed, epoch) for i in positions)
        implied = cursor_at(spec, Step(step), prompts)
        assert take(spec, implied, prompts, size)[0] == taken


@given(size=sizes, more=st.integers(0, 12), counts=st.lists(st.integers(1, 5), max_size=30))
def test_no_prompt_repeats_within_an_epoch(size: int, more: int, counts: list[int]) -> None:
    """Steps and extra prompts take turns."""
    spec, prompts, cursor = small_spec(prompts=size), size + more, PromptCursor()
    seen: set[tuple[int, PromptIndex]] = set()
    for count in counts:
        taken, cursor = take(spec, cursor, prompts, min(count, prompts))
        new = {(cursor.epoch, prompt) for prompt in taken}
        assert len(new) == len(taken)
        assert not new & seen
        seen |= new


def test_a_batch_across_two_epochs_has_no_prompt_twice() -> None:
    spec = small_spec()
    batch, cursor = take(spec, PromptCursor(), 3, 2)
    last, cursor = take(spec, cursor, 3, 1, batch)
    assert sorted((*batch, *last)) == [0, 1, 2]
    assert cursor == PromptCursor(epoch=0, position=3)
    first, cursor = take(spec, cursor, 3, 1, batch)
    assert first == last
    assert cursor.epoch == 1


def _with_data(**changes: object) -> JobSpec:
    spec = small_spec(prompts=2)
    return msgspec.structs.replace(spec, data=msgspec.structs.replace(spec.data, **changes))


def test_sorted_prompts_keep_their_order_in_every_epoch() -> None:
    spec, cursor = _with_data(order_by="difficulty"), PromptCursor()
    for expected in ((0, 1), (2, 3), (0, 1), (2, 3)):
        taken, cursor = take(spec, cursor, 4, 2)
        assert taken == expected


def test_solved_prompts_are_skipped_for_some_epochs() -> None:
    spec = _with_data(order_by="difficulty", skip_solved_epochs=2)
    first, cursor = take(spec, PromptCursor(), 6, 2)
    cursor = skip_solved(spec, cursor, first)
    seen: dict[int, list[PromptIndex]] = {0: [*first]}
    while cursor.epoch < 4:
        taken, cursor = take(spec, cursor, 6, 2)
        seen.setdefault(cursor.epoch, []).extend(taken)
    assert [seen[epoch] for epoch in range(4)] == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5],
        [2, 3, 4, 5],
        [0, 1, 2, 3, 4, 5],
    ]


def test_a_job_goes_on_when_all_prompts_are_solved() -> None:
    spec = _with_data(skip_solved_epochs=3)
    cursor = skip_solved(spec, PromptCursor(position=4), [PromptIndex(i) for i in range(4)])
    taken, cursor = take(spec, cursor, 4, 2)
    assert len(set(taken)) == 2
    assert cursor.epoch == 4
