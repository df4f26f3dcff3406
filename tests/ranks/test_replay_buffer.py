"""The replay buffer bounds its memory and keeps the origin of its answers."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tlt.base.id_types import Member, PromptIndex, Step
from tlt.engine.base import NoiseKey
from tlt.policies.drafter.data_selection import is_held_out
from tlt.ranks.drafter import shared_hidden_states
from tlt.ranks.drafter.replay_buffer import Answer, ReplayBuffer
from tlt.ranks.drafter.shared_hidden_states import HiddenStateStore

PROMPT = (1, 2, 3)


@pytest.fixture(autouse=True)
def nearly_full_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let these tests pass on any machine: a store leaves a part of its disk free."""
    monkeypatch.setattr(shared_hidden_states, "_LEFT_FREE", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> HiddenStateStore:
    return HiddenStateStore(tmp_path, torch.empty(1, 2))


def key(prompt: int, member: int = 0, step: int = 0, purpose: str = "train") -> NoiseKey:
    return NoiseKey(
        seed=1,
        step=Step(step),
        purpose=purpose,  # pyright: ignore
        prompt=PromptIndex(prompt),
        member=Member(member),
    )


def drawable_prompts(step: int = 0) -> list[int]:
    """Return prompts whose first answers are not held out."""
    numbers = range(200)
    return [n for n in numbers if not is_held_out((), Step(step), PromptIndex(n), Member(0))]


def states(length: int) -> torch.Tensor:
    return torch.ones(len(PROMPT) + length - 1, 1, 2)


def add(replay: ReplayBuffer, prompt: int, length: int, origin: str = "own", step: int = 0) -> None:
    tokens = list(range(length))
    given = (lambda: states(length)) if origin == "own" else None
    replay.add(origin, key(prompt, step=step), PROMPT, tokens, given)  # pyright: ignore


def everything(replay: ReplayBuffer) -> list[Answer]:
    """Draw all answers that aren't held out."""
    return replay.draw(10**6, [i / 200 for i in range(200)])


def test_memory_is_bounded_and_long_answers_stay(store: HiddenStateStore) -> None:
    replay = ReplayBuffer(store, 4000)
    for prompt in range(60):
        add(replay, prompt, 5 + prompt)
        assert replay.bytes <= 4000
    assert 0 < len(everything(replay)) < 60
    assert min(len(answer.tokens) for answer in replay.some_with_states()) > 20


def test_copies_only_states_of_answers_that_are_kept(store: HiddenStateStore) -> None:
    replay, copied = ReplayBuffer(store, 1600), list[int]()

    def counted(length: int) -> torch.Tensor:
        copied.append(length)
        return states(length)

    for prompt, length in enumerate(range(60, 10, -1)):
        tokens = list(range(length))
        replay.add("own", key(prompt), PROMPT, tokens, partial(counted, length))
    assert copied == [len(answer.tokens) - len(PROMPT) for answer in replay.some_with_states()]


def test_a_whole_answer_replaces_the_partial_one(store: HiddenStateStore) -> None:
    replay, prompt = ReplayBuffer(store, 10**6), drawable_prompts()[0]
    add(replay, prompt, 4, "unfinished")
    add(replay, prompt, 9, "unfinished")
    assert len(everything(replay)) == 1
    add(replay, prompt, 12, "others")
    add(replay, prompt, 10, "unfinished")
    (answer,) = replay.draw(100, [0.5] * 4)
    assert answer.candidate.origin == "others"
    assert len(answer.tokens) == len(PROMPT) + 12


def test_keeps_whole_answers_of_recent_steps(
    store: HiddenStateStore,
) -> None:
    replay = ReplayBuffer(store, 10**6)
    first, second = drawable_prompts(0)[0], drawable_prompts(1)[0]
    add(replay, first, 9)
    add(replay, first + 1, 9, "unfinished")
    replay.begin(Step(1))
    add(replay, second, 9, step=1)
    origins = {answer.candidate.origin for answer in replay.draw(1000, [0.1, 0.9, 0.3])}
    assert origins == {"own", "earlier"}
    replay.begin(Step(5))
    drawn = replay.draw(1000, [0.1, 0.9])
    assert {answer.candidate.origin for answer in drawn} == {"earlier"}
    assert {answer.key.step for answer in drawn} == {0, 1}
    replay.begin(Step(17))
    assert {answer.key.step for answer in replay.draw(1000, [0.1, 0.9])} == {1}


def test_makes_room_for_new_answers_by_forgetting_old_ones(store: HiddenStateStore) -> None:
    size = store.token_bytes + 8
    replay = ReplayBuffer(store, 5 * (len(PROMPT) + 9) * size)
    for step in range(8):
        replay.begin(Step(step))
        add(replay, drawable_prompts(step)[0], 9, step=step)
    drawn = replay.draw(1000, [i / 50 for i in range(50)])
    assert {answer.key.step for answer in drawn} == {3, 4, 5, 6, 7}


def test_deletes_files_that_a_dead_rank_has_left(store: HiddenStateStore, tmp_path: Path) -> None:
    first, second = drawable_prompts(0)[:2]
    add(ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2)), 10**6), first, 9)
    replay = ReplayBuffer(store, 10**6)
    add(replay, second, 9)
    (tmp_path / "0.7.0.unfinished-x").touch()
    replay.begin(Step(1))
    assert len(list(tmp_path.iterdir())) == 3
    replay.begin(Step(17))
    assert not list(tmp_path.iterdir())


def test_does_not_draw_answers_that_evaluations_need(store: HiddenStateStore) -> None:
    replay = ReplayBuffer(store, 10**6)
    for prompt in range(80):
        add(replay, prompt, 6)
    evaluated = {answer.name for answer in replay.evaluation_answers()}
    assert len(evaluated) == 8
    randoms = [i / 200 for i in range(200)]
    assert not evaluated & {answer.name for answer in replay.draw(10**6, randoms)}


def test_draws_held_out_answers_a_step_later(
    store: HiddenStateStore,
) -> None:
    replay = ReplayBuffer(store, 10**6)
    replay.begin(Step(0))
    held = {Step(0): (PromptIndex(7), PromptIndex(9))}
    replay.hold_out(held)
    for prompt in (1, 7, 9, 12):
        for member in range(3):
            replay.add("own", key(prompt, member), PROMPT, [1, 2, 3], lambda: states(3))
    replay.add("unfinished", key(9, 3), PROMPT, [1, 2, 3])
    randoms = [i / 50 for i in range(50)]

    def drawn() -> set[int]:
        return {answer.key.prompt for answer in replay.draw(10**6, randoms)}

    def evaluate_on() -> set[tuple[int, int]]:
        return {(a.key.prompt, a.key.member) for a in replay.evaluation_answers()}

    assert drawn() == {1, 12}
    # a partial answer is not evaluated on
    assert evaluate_on() == {(prompt, member) for prompt in (7, 9) for member in range(3)}
    replay.begin(Step(1))
    replay.hold_out({**held, Step(1): (PromptIndex(3),)})
    replay.add("own", key(3, 0, 1), PROMPT, [1, 2, 3], lambda: states(3))
    assert evaluate_on() == {(3, 0)}
    assert drawn() == {1, 7, 9, 12}
    replay.begin(Step(2))
    replay.hold_out({Step(1): (PromptIndex(3),), Step(2): (PromptIndex(5),)})
    assert evaluate_on() == {(3, 0)}
    assert drawn() == {1, 7, 9, 12}


def test_refuses_answers_to_evaluations_and_of_old_steps(store: HiddenStateStore) -> None:
    replay = ReplayBuffer(store, 10**6)
    replay.begin(Step(3))
    add(replay, 1, 9, step=2)
    replay.add("own", key(1, step=3, purpose="eval"), PROMPT, [1, 2, 3])
    replay.add("own", key(2, step=3), PROMPT, [1])
    assert everything(replay) == []
    assert replay.draw(100, [0.5]) == []
    assert replay.evaluation_answers() == []


def test_finds_states_that_another_rank_has_captured(tmp_path: Path) -> None:
    token = torch.empty(1, 2)
    ours, theirs = (ReplayBuffer(HiddenStateStore(tmp_path, token), 10**6) for _ in range(2))
    name = drawable_prompts()[0]
    add(ours, name, 9)
    add(theirs, name, 9, "others")
    (answer,) = theirs.draw(100, [0.5])
    assert answer.states is None
    assert theirs.fetch(answer)
    assert answer.states is not None
    assert torch.equal(answer.states, states(9))
    ours.begin(Step(17))
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(answer.states, states(9))  # still mapped in this process


def test_shares_states_of_partial_answers_until_they_are_whole(tmp_path: Path) -> None:
    token = torch.empty(1, 2)
    ours, theirs = (ReplayBuffer(HiddenStateStore(tmp_path, token), 10**6) for _ in range(2))
    name = drawable_prompts()[0]
    add(theirs, name, 6, "unfinished")
    (answer,) = theirs.draw(100, [0.5])
    assert not theirs.fetch(answer)
    ours.share_partial(key(name), states(4))
    assert not theirs.fetch(answer)  # fewer states than are needed
    ours.share_partial(key(name), states(8))
    assert theirs.fetch(answer)
    assert answer.sample().states.shape == states(6).shape
    add(ours, name, 12)
    assert len(list(tmp_path.iterdir())) == 1
    ours.begin(Step(1))
    ours.begin(Step(17))
    assert list(tmp_path.iterdir()) == []


def test_bounds_the_states_of_partial_answers_too(tmp_path: Path) -> None:
    first, second, third = drawable_prompts()[:3]
    replay = ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2)), 2 * states(9).nbytes)
    for name in (first, second, third):
        replay.share_partial(key(name), states(9))
    assert len(list(tmp_path.iterdir())) == 2
    replay.share_partial(key(second), states(10))  # replaces the shorter one, but doesn't fit
    replay.share_partial(key(third), states(9))
    assert len(list(tmp_path.iterdir())) == 2
    add(replay, first, 9)  # the answer is whole
    replay.share_partial(key(third), states(9))
    assert len([file for file in tmp_path.iterdir() if file.name.endswith("partial")]) == 2
    replay.begin(Step(1))
    for name in (first, second, third):
        replay.share_partial(key(name, step=1), states(9))
    assert len([file for file in tmp_path.iterdir() if file.name.startswith("1.")]) == 2


@pytest.mark.parametrize(("reserved", "shared"), [(0, 1), (2**62, 0)])
def test_leaves_room_for_what_a_job_needs(reserved: int, shared: int, tmp_path: Path) -> None:
    replay = ReplayBuffer(HiddenStateStore(tmp_path, torch.empty(1, 2), lambda: reserved), 10**6)
    add(replay, drawable_prompts()[0], 9)
    assert len(list(tmp_path.iterdir())) == shared
    (answer,) = replay.some_with_states()
    assert answer.states is not None


def test_keeps_private_states_without_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    replay = ReplayBuffer(HiddenStateStore(tmp_path / "file", torch.empty(1, 2)), 10**6)
    add(replay, drawable_prompts()[0], 9)
    (answer,) = replay.some_with_states()
    assert answer.states is not None
    assert torch.equal(answer.states, states(9))


def test_keeps_late_answers_of_a_step_while_the_next_one_is_decoded(
    store: HiddenStateStore,
) -> None:
    replay = ReplayBuffer(store, 10**6, ahead=1)
    first, second = drawable_prompts(0)[:2], drawable_prompts(1)[0]
    add(replay, first[0], 4, "unfinished")
    add(replay, second, 9, step=1)
    add(replay, first[1], 12, "others")
    replay.begin(Step(0))
    found = {(answer.key.step, answer.candidate.origin) for answer in everything(replay)}
    assert found == {(0, "unfinished"), (1, "own"), (0, "others")}
    # answers that are to evaluate drafters once their step is at hand
    held = next(n for n in range(200) if n not in drawable_prompts(1))
    add(replay, held, 9, step=1)
    assert (1, held, 0) not in {answer.name for answer in everything(replay)}
