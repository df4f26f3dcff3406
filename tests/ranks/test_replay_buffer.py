"""What a drafter learns from is bounded, and comes from where it is said to come from."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tlt.engine.base import NoiseKey
from tlt.ids import Member, PromptIndex, Step
from tlt.policies.drafter.data_selection import is_held_out
from tlt.ranks.hidden_state_store import HiddenStateStore
from tlt.ranks.replay_buffer import Answer, ReplayBuffer

PROMPT = (1, 2, 3)


@pytest.fixture
def shelf(tmp_path: Path) -> HiddenStateStore:
    return HiddenStateStore(tmp_path, torch.empty(1, 2))


def key(prompt: int, member: int = 0, step: int = 0, purpose: str = "train") -> NoiseKey:
    return NoiseKey(
        seed=1,
        step=Step(step),
        purpose=purpose,  # pyright: ignore
        prompt=PromptIndex(prompt),
        member=Member(member),
    )


def learned(step: int = 0) -> list[int]:
    """Prompts whose first answers are not held out."""
    numbers = range(200)
    return [n for n in numbers if not is_held_out((), Step(step), PromptIndex(n), Member(0))]


def states(length: int) -> torch.Tensor:
    return torch.ones(len(PROMPT) + length - 1, 1, 2)


def add(pool: ReplayBuffer, prompt: int, length: int, origin: str = "own", step: int = 0) -> None:
    tokens = list(range(length))
    given = (lambda: states(length)) if origin == "own" else None
    pool.add(origin, key(prompt, step=step), PROMPT, tokens, given)  # pyright: ignore


def everything(pool: ReplayBuffer) -> list[Answer]:
    """Draw all answers that aren't held out."""
    return pool.draw(10**6, [i / 200 for i in range(200)])


def test_memory_is_bounded_and_long_answers_stay(shelf: HiddenStateStore) -> None:
    pool = ReplayBuffer(shelf, 4000)
    for prompt in range(60):
        add(pool, prompt, 5 + prompt)
        assert pool.bytes <= 4000
    assert 0 < len(everything(pool)) < 60
    assert min(len(answer.tokens) for answer in pool.some_with_states()) > 20


def test_only_states_of_what_is_kept_are_copied(shelf: HiddenStateStore) -> None:
    pool, copied = ReplayBuffer(shelf, 1600), list[int]()

    def counted(length: int) -> torch.Tensor:
        copied.append(length)
        return states(length)

    for prompt, length in enumerate(range(60, 10, -1)):
        tokens = list(range(length))
        pool.add("own", key(prompt), PROMPT, tokens, partial(counted, length))
    assert copied == [len(answer.tokens) - len(PROMPT) for answer in pool.some_with_states()]


def test_a_growing_answer_gives_way_to_the_whole_one(shelf: HiddenStateStore) -> None:
    pool, prompt = ReplayBuffer(shelf, 10**6), learned()[0]
    add(pool, prompt, 4, "running")
    add(pool, prompt, 9, "running")
    assert len(everything(pool)) == 1
    add(pool, prompt, 12, "others")
    add(pool, prompt, 10, "running")
    (answer,) = pool.draw(100, [0.5] * 4)
    assert answer.candidate.origin == "others"
    assert len(answer.tokens) == len(PROMPT) + 12


def test_the_step_before_is_still_learned_from_and_the_one_before_that_is_not(
    shelf: HiddenStateStore,
) -> None:
    pool = ReplayBuffer(shelf, 10**6)
    first, second = learned(0)[0], learned(1)[0]
    add(pool, first, 9)
    add(pool, first + 1, 9, "running")
    pool.begin(Step(1))
    add(pool, second, 9, step=1)
    origins = {answer.candidate.origin for answer in pool.draw(1000, [0.1, 0.9, 0.3])}
    assert origins == {"own", "previous"}
    pool.begin(Step(2))
    assert {answer.candidate.origin for answer in pool.draw(1000, [0.1, 0.9])} == {"previous"}


def test_what_a_rank_that_died_has_left_goes_with_its_step(
    shelf: HiddenStateStore, tmp_path: Path
) -> None:
    first, second = learned(0)[:2]
    add(ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2)), 10**6), first, 9)
    pool = ReplayBuffer(shelf, 10**6)
    add(pool, second, 9)
    (tmp_path / "0.7.0.unfinished-x").touch()
    pool.begin(Step(1))
    assert len(list(tmp_path.iterdir())) == 3
    pool.begin(Step(2))
    assert not list(tmp_path.iterdir())


def test_what_measures_is_not_learned_from(shelf: HiddenStateStore) -> None:
    pool = ReplayBuffer(shelf, 10**6)
    for prompt in range(80):
        add(pool, prompt, 6)
    measured = {answer.name for answer in pool.evaluation_answers()}
    assert len(measured) == 8
    dice = [i / 200 for i in range(200)]
    assert not measured & {answer.name for answer in pool.draw(10**6, dice)}


def test_who_answers_a_prompt_that_measures_is_learned_from_a_step_later(
    shelf: HiddenStateStore,
) -> None:
    pool = ReplayBuffer(shelf, 10**6)
    pool.begin(Step(0))
    held = {Step(0): (PromptIndex(7), PromptIndex(9))}
    pool.hold_out(held)
    for prompt in (1, 7, 9, 12):
        for member in range(3):
            pool.add("own", key(prompt, member), PROMPT, [1, 2, 3], lambda: states(3))
    pool.add("running", key(9, 3), PROMPT, [1, 2, 3])
    dice = [i / 50 for i in range(50)]

    def drawn() -> set[int]:
        return {answer.key.prompt for answer in pool.draw(10**6, dice)}

    def measure() -> set[tuple[int, int]]:
        return {(a.key.prompt, a.key.member) for a in pool.evaluation_answers()}

    assert drawn() == {1, 12}
    # what is still being written measures nothing
    assert measure() == {(prompt, member) for prompt in (7, 9) for member in range(3)}
    pool.begin(Step(1))
    pool.hold_out({**held, Step(1): (PromptIndex(3),)})
    pool.add("own", key(3, 0, 1), PROMPT, [1, 2, 3], lambda: states(3))
    assert measure() == {(3, 0)}
    assert drawn() == {1, 7, 9, 12}
    pool.begin(Step(2))
    pool.hold_out({Step(1): (PromptIndex(3),), Step(2): (PromptIndex(5),)})
    assert measure() == {(3, 0)}
    assert drawn() == set()


def test_answers_to_evaluations_and_of_old_steps_are_not_taken(shelf: HiddenStateStore) -> None:
    pool = ReplayBuffer(shelf, 10**6)
    pool.begin(Step(3))
    add(pool, 1, 9, step=2)
    pool.add("own", key(1, step=3, purpose="eval"), PROMPT, [1, 2, 3])
    pool.add("own", key(2, step=3), PROMPT, [1])
    assert everything(pool) == []
    assert pool.draw(100, [0.5]) == []
    assert pool.evaluation_answers() == []


def test_what_one_has_captured_is_there_for_the_others(tmp_path: Path) -> None:
    token = torch.empty(1, 2)
    ours, theirs = (ReplayBuffer(HiddenStateStore(tmp_path, token), 10**6) for _ in range(2))
    name = learned()[0]
    add(ours, name, 9)
    add(theirs, name, 9, "others")
    (answer,) = theirs.draw(100, [0.5])
    assert answer.states is None
    assert theirs.fetch(answer)
    assert answer.states is not None
    assert torch.equal(answer.states, states(9))
    ours.begin(Step(2))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(answer.states, states(9))  # it is mapped here


def test_what_is_still_being_written_is_lent_and_taken_back(tmp_path: Path) -> None:
    token = torch.empty(1, 2)
    ours, theirs = (ReplayBuffer(HiddenStateStore(tmp_path, token), 10**6) for _ in range(2))
    name = learned()[0]
    add(theirs, name, 6, "running")
    (answer,) = theirs.draw(100, [0.5])
    assert not theirs.fetch(answer)
    ours.share_partial(key(name), states(4))
    assert not theirs.fetch(answer)  # they are too few yet
    ours.share_partial(key(name), states(8))
    assert theirs.fetch(answer)
    assert answer.sample().states.shape == states(6).shape
    add(ours, name, 12)
    assert len(list(tmp_path.iterdir())) == 1
    ours.begin(Step(1))
    ours.begin(Step(2))
    assert list(tmp_path.iterdir()) == []


def test_what_is_lent_is_bounded_too(tmp_path: Path) -> None:
    """By as much as is kept; who asks for the rest reads it."""
    first, second, third = learned()[:3]
    pool = ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2)), 2 * states(9).nbytes)
    for name in (first, second, third):
        pool.share_partial(key(name), states(9))
    assert len(list(tmp_path.iterdir())) == 2
    pool.share_partial(key(second), states(10))  # replaces the shorter one, and doesn't fit
    pool.share_partial(key(third), states(9))
    assert len(list(tmp_path.iterdir())) == 2
    add(pool, first, 9)  # it has ended
    pool.share_partial(key(third), states(9))
    assert len([file for file in tmp_path.iterdir() if file.name.endswith("growing")]) == 2
    pool.begin(Step(1))
    for name in (first, second, third):
        pool.share_partial(key(name, step=1), states(9))
    assert len([file for file in tmp_path.iterdir() if file.name.startswith("1.")]) == 2


@pytest.mark.parametrize(("leave", "seen"), [(0, 1), (2**62, 0)])
def test_room_for_what_a_job_needs_is_left(leave: int, seen: int, tmp_path: Path) -> None:
    pool = ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2), lambda: leave), 10**6)
    add(pool, learned()[0], 9)
    assert len(list(tmp_path.iterdir())) == seen
    (answer,) = pool.some_with_states()
    assert answer.states is not None


def test_without_room_for_others_to_see_it_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pool = ReplayBuffer(HiddenStateStore(tmp_path / "file", torch.empty(1, 2)), 10**6)
    add(pool, learned()[0], 9)
    (answer,) = pool.some_with_states()
    assert answer.states is not None
    assert torch.equal(answer.states, states(9))
