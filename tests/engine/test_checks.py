"""What n-grams would have guessed is judged by what was drawn, without decoding by them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.engine import drafting
from tests.engine.oracle import GREEDY, answers, ask, show
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.ngrams import Ngrams
from tlt.models.folder import load_decoder
from tlt.policies.adaptive import AdaptivePolicy
from tlt.policies.strategy import Choice
from tlt.strategies import Ngram, Off, Strategy
from tlt.types import PolicyVersion

MOST = 5
PROMPT = (3, 1, 4)


class Always(AdaptivePolicy):
    """The same strategy, and the sums of what was checked meanwhile."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.reached, self.accepted = [0] * MOST, [0] * MOST

    def choose(self, batch: int, context: int, random: float) -> Choice:
        return Choice(self.strategy, 1.0, "only")

    def checked(self, strategy: Strategy, reached: Sequence[int], accepted: Sequence[int]) -> None:
        assert strategy == Ngram(tokens=MOST)
        assert reached[0] > 0
        self.reached = [a + b for a, b in zip(self.reached, reached, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, accepted, strict=True)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafting.predictable_policy(tmp_path_factory.mktemp("policy"))


def engine(folder: Path, strategies: AdaptivePolicy) -> NativeEngine:
    arms = (Off(), Ngram(tokens=2), Ngram(tokens=MOST))
    model, device = load_decoder(folder, torch.float64), torch.device("cpu")
    made = NativeEngine(model, show, 6, 128, device, PolicyVersion(0), (), arms)
    made.let_choose(strategies, 0)
    return made


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [61, 100])
def test_a_check_tells_what_a_round_of_ngrams_would_have_told(
    policy: Path, sampling: Sampling, tokens: int
) -> None:
    """Every guess of the index as it was then, against the answer as it is now."""
    strategies = Always(Off())
    # what is still open when an answer ends is told with the next one's
    asked = [ask(0, PROMPT, sampling, tokens), ask(1, PROMPT, sampling, 12, member=0)]
    made = engine(policy, strategies)
    written = answers(made, asked[:1])[0].tokens
    answers(made, asked[1:])
    reached, accepted = [0] * MOST, [0] * MOST
    index = Ngrams(1 << 20)
    for row, answer in enumerate((written, written[:12])):
        index.begin(row, PROMPT, "group")
        for place in range(1, len(answer)):
            index.extend(row, answer[place - 1 : place])
            # rounds go on counting
            if (place + row * len(written)) % 2 or (row == 1 and place > 12 - MOST - 1):
                continue
            guess = index.propose(row, MOST).tokens
            for depth, token in enumerate(answer[place : place + MOST]):
                reached[depth] += 1
                if guess[depth : depth + 1] != [token]:
                    break
                accepted[depth] += 1
        index.extend(row, answer[-1:])
    assert sum(accepted) > 10
    assert (strategies.reached, strategies.accepted) == (reached, accepted)


def test_who_decodes_by_ngrams_is_not_checked(policy: Path) -> None:
    strategies = Always(Ngram(tokens=MOST))
    answers(engine(policy, strategies), [ask(i, PROMPT, Sampling(), 40) for i in range(8)])
    assert strategies.reached[0] == 0


def test_rows_take_turns_and_those_that_ended_first_teach_the_others(policy: Path) -> None:
    """One answer ends before the others begin: they repeat it."""
    strategies = Always(Off())
    made = engine(policy, strategies)
    answers(made, [ask(0, PROMPT, GREEDY, 30)])
    strategies.reached, strategies.accepted = [0] * MOST, [0] * MOST
    answers(made, [ask(i, PROMPT, GREEDY, 30) for i in range(1, 7)])
    # six rows, four of them every other round, and the last guesses of all are not told
    assert 6 * 30 * 4 / 6 / 2 - 6 * MOST < strategies.reached[0] <= 6 * 30 * 4 / 6 / 2
    # what a sibling that runs has written may be shorter than a guess
    assert strategies.accepted[:2] == strategies.reached[:2]
