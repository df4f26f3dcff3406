"""What a drafter learns from is bounded, and comes from where it is said to come from."""

import torch

from tlt.engine.base import NoiseKey
from tlt.policies.sampling import held_out
from tlt.ranks.pool import Pool
from tlt.types import Member, PolicyVersion, PromptIndex, Step

STATES = 8
PROMPT = (1, 2, 3)


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
    return [n for n in numbers if not held_out(Step(step), PromptIndex(n), Member(0))]


def states(length: int) -> torch.Tensor:
    return torch.ones(len(PROMPT) + length - 1, 1, 2)


def add(pool: Pool, prompt: int, length: int, origin: str = "own", step: int = 0) -> None:
    tokens = list(range(length))
    given = (lambda: states(length)) if origin == "own" else None
    version = PolicyVersion(0) if origin == "own" else None
    pool.add(origin, key(prompt, step=step), PROMPT, tokens, given, version)  # pyright: ignore


def test_memory_is_bounded_and_long_answers_stay() -> None:
    pool = Pool(STATES, 4000)
    for prompt in range(60):
        add(pool, prompt, 5 + prompt)
        assert pool.bytes <= 4000
    assert 0 < len(pool) < 60
    assert min(len(answer.tokens) for answer in pool.known()) > 20


def test_only_states_of_what_is_kept_are_copied() -> None:
    pool, copied = Pool(STATES, 1600), list[int]()

    def counted(length: int) -> torch.Tensor:
        copied.append(length)
        return states(length)

    for prompt, length in enumerate(range(60, 10, -1)):
        tokens = list(range(length))
        kept = lambda length=length: counted(length)  # noqa: E731
        pool.add("own", key(prompt), PROMPT, tokens, kept, PolicyVersion(0))
    assert copied == [len(answer.tokens) - len(PROMPT) for answer in pool.known()]


def test_a_growing_answer_gives_way_to_the_whole_one() -> None:
    pool, prompt = Pool(STATES, 10**6), learned()[0]
    add(pool, prompt, 4, "running")
    add(pool, prompt, 9, "running")
    assert len(pool) == 1
    add(pool, prompt, 12, "others")
    add(pool, prompt, 10, "running")
    (answer,) = pool.draw(100, [0.5] * 4)
    assert answer.candidate.origin == "others"
    assert len(answer.tokens) == len(PROMPT) + 12


def test_the_step_before_is_still_learned_from_and_the_one_before_that_is_not() -> None:
    pool = Pool(STATES, 10**6)
    first, second = learned(0)[0], learned(1)[0]
    add(pool, first, 9)
    add(pool, first + 1, 9, "running")
    pool.begin(Step(1))
    add(pool, second, 9, step=1)
    origins = {answer.candidate.origin for answer in pool.draw(1000, [0.1, 0.9, 0.3])}
    assert origins == {"own", "previous"}
    pool.begin(Step(2))
    assert {answer.candidate.origin for answer in pool.draw(1000, [0.1, 0.9])} == {"previous"}


def test_what_measures_is_not_learned_from() -> None:
    pool = Pool(STATES, 10**6)
    for prompt in range(80):
        add(pool, prompt, 6)
    measured = {answer.name for answer in pool.canaries()}
    assert len(measured) == 8
    dice = [i / 200 for i in range(200)]
    assert not measured & {answer.name for answer in pool.draw(10**6, dice)}


def test_answers_to_evaluations_and_of_old_steps_are_not_taken() -> None:
    pool = Pool(STATES, 10**6)
    pool.begin(Step(3))
    add(pool, 1, 9, step=2)
    pool.add("own", key(1, step=3, purpose="eval"), PROMPT, [1, 2, 3])
    pool.add("own", key(2, step=3), PROMPT, [1])
    assert len(pool) == 0
    assert pool.draw(100, [0.5]) == []
    assert pool.canaries() == []
