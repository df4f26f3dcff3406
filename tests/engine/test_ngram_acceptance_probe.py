"""What n-grams would have come to is told while others decode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.reference import GREEDY, answers, ask, show
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.ngram import NgramIndex
from tlt.ids import DrafterVersion, PolicyVersion
from tlt.models.eagle_drafter import Drafter
from tlt.models.model_folder import load_decoder
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import Choice, ChoiceReason
from tlt.strategies import Draft, Ngram, Off, Strategy

MOST = 5
DRAFT = Draft(depth=3)
PROMPT, OTHER = (3, 1, 4), (27, 18, 2)


class Sums:
    def __init__(self) -> None:
        self.reached, self.accepted = [0] * MOST, [0] * MOST

    def add(self, reached: Sequence[int], accepted: Sequence[int]) -> None:
        self.reached = [a + b for a, b in zip(self.reached, reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return f"{self.reached} {self.accepted}"


class Always(AdaptivePolicy):
    """These strategies by turns, and what was told of n-grams."""

    def __init__(self, *strategies: Strategy, why: ChoiceReason = "only") -> None:
        super().__init__()
        self._strategies = strategies
        self._why: ChoiceReason = why
        self._rounds = 0
        self.checks, self.rounds = Sums(), Sums()
        # sizes that were told with checks
        self.batches: set[int] = set()
        # tokens of every row and round
        self.kept: list[int] = []

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self._rounds += 1
        return Choice(self._strategies[self._rounds % len(self._strategies)], 1.0, self._why)

    def observe(self, strategy: Strategy, *round: Any) -> None:
        self.kept.append(1 + sum(round[5]))
        if strategy == Ngram(tokens=MOST):
            self.rounds.add(round[4], round[5])

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        assert strategy == Ngram(tokens=MOST)
        assert reached[0] > 0
        self.batches.add(batch)
        self.checks.add(reached, accepted)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def drafter(policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle", policy)


def engine(
    folder: Path, strategies: AdaptivePolicy, drafter: Drafter | None = None
) -> NativeEngine:
    arms = (Off(), Ngram(tokens=2), Ngram(tokens=MOST), DRAFT)
    model, device = load_decoder(folder, torch.float64), torch.device("cpu")
    layers = range(1, model.config.layers + 1)
    made = NativeEngine(model, show, 6, 128, device, PolicyVersion(0), layers, arms)
    if drafter is not None:
        made.adopt_drafter(DrafterVersion(1), drafter)
    made.set_strategy_policy(strategies, 0)
    return made


def told(folder: Path, made: NativeEngine) -> None:
    """The last few guesses are told before policies are swapped."""
    made.swap_weights(PolicyVersion(1), load_decoder(folder, torch.float64).weights)


def guessed(written: Sequence[Sequence[int]], firsts: Sequence[int]) -> Sums:
    """Answers one after the other, each in rounds of n-grams from its first few tokens on."""
    sums, index = Sums(), NgramIndex(1 << 20)
    for row, (answer, first) in enumerate(zip(written, firsts, strict=True)):
        index.begin(row, PROMPT, "group")
        read, place = 0, first
        while place < len(answer):
            index.extend(row, answer[read:place])
            guess, rest = index.propose(row, MOST).tokens, answer[place : place + MOST]
            agree = [one == other for one, other in zip(guess, rest, strict=False)]
            right = next((i for i, same in enumerate(agree) if not same), len(agree))
            reached = [int(depth <= right and depth < len(rest)) for depth in range(MOST)]
            sums.add(reached, [int(depth < right) for depth in range(MOST)])
            read, place = place, place + right + 1
        index.extend(row, answer[read:])
    return sums


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [61, 100])
def test_a_row_is_followed_as_if_ngrams_guessed_for_it(
    policy: Path, sampling: Sampling, tokens: int
) -> None:
    """The rounds of n-grams begin with the first token, checks after it."""
    asked = [ask(0, PROMPT, sampling, tokens), ask(1, PROMPT, sampling, 12, member=0)]
    followed, decoding = Always(Off()), Always(Ngram(tokens=MOST))
    for strategies in (followed, decoding):
        made = engine(policy, strategies)
        written = [answers(made, [request])[request.id].tokens for request in asked]
        told(policy, made)
    assert sum(followed.checks.accepted) > 10
    assert followed.checks == guessed(written, (1, 1))
    assert followed.batches == {1}
    assert decoding.rounds == guessed(written, (0, 0))
    assert decoding.checks == Sums()


@pytest.mark.parametrize("tokens", [61, 100])
def test_where_others_end_their_rounds_makes_no_difference(
    policy: Path, drafter: Drafter, tokens: int
) -> None:
    """A round of the drafter may pass what several guesses would have come to."""
    asked = [ask(0, PROMPT, Sampling(), tokens), ask(1, PROMPT, Sampling(), 12, member=0)]
    strategies = Always(DRAFT)
    made = engine(policy, strategies, drafter)
    written, firsts = list[Sequence[int]](), list[int]()
    for request in asked:
        rounds = len(strategies.kept)
        written.append(answers(made, [request])[request.id].tokens)
        firsts.append(strategies.kept[rounds])
    told(policy, made)
    assert max(strategies.kept) > 2
    assert sum(strategies.checks.accepted) > 5
    assert strategies.checks == guessed(written, firsts)


def test_what_others_are_measured_against_does_nothing_else(policy: Path) -> None:
    strategies = Always(Off(), why="control")
    made = engine(policy, strategies)
    answers(made, [ask(i, PROMPT, Sampling(), 40) for i in range(8)])
    told(policy, made)
    assert strategies.checks == Sums()


class Compared(Always):
    """Eight rounds of each kind by turns."""

    @property
    def comparing(self) -> bool:
        return self._rounds // 8 % 2 == 1

    def choose(self, batch: int, context: int, random: float) -> Choice:
        choice = super().choose(batch, context, random)
        return msgspec.structs.replace(choice, why="control") if self.comparing else choice


def test_what_was_guessed_before_is_judged_after(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks up anything meanwhile; guesses go on where the one that was open ends."""
    strategies, begun = Compared(Off()), list[bool]()
    look_up = NgramProposer.guess

    def guess(*args: Any) -> list[int]:
        begun.append(strategies.comparing)
        return look_up(*args)

    monkeypatch.setattr(NgramProposer, "guess", guess)
    made = engine(policy, strategies)
    written = answers(made, [ask(0, PROMPT, GREEDY, 100)])[0].tokens
    told(policy, made)
    assert len(written) == 100
    assert len(begun) > 10
    assert not any(begun)
    assert strategies.checks == guessed([written], [1])


def test_rows_move_end_and_are_cancelled_while_they_are_followed(policy: Path) -> None:
    """Answers repeat one of two that were given before: what is not refused by an end is right."""
    strategies = Always(Off(), Off(), Ngram(tokens=2))
    made = engine(policy, strategies)
    answers(made, [ask(i, prompt, GREEDY, 60) for i, prompt in enumerate((PROMPT, OTHER))])
    told(policy, made)
    strategies.checks = Sums()
    prompts = (PROMPT, OTHER) * 12
    made.submit([ask(9 + i, prompt, GREEDY, 3 + 11 * i % 40) for i, prompt in enumerate(prompts)])
    rounds = 0
    while made.running:
        made.step()
        rounds += 1
        if rounds % 9 == 0:
            made.cancel([9 + rounds % 24])
    told(policy, made)
    assert strategies.checks.reached[0] > 20
    assert strategies.batches <= set(range(1, 7))
    assert max(strategies.batches) > 1
    # what a sibling that runs has written may be shorter than a guess, or nothing
    assert strategies.checks.accepted[0] > 0.9 * strategies.checks.reached[0]
    assert strategies.checks.accepted[1] == strategies.checks.reached[1]
