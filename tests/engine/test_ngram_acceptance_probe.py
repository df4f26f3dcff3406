"""Probes measure the acceptance of n-grams while other strategies decode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.engine import drafter_models
from tests.engine.reference import GREEDY, answers, new_request, show
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.engine.native.ngram_proposer import NgramProposer
from tlt.engine.ngram import NgramIndex
from tlt.id_types import DrafterVersion, PolicyVersion
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import Drafter
from tlt.policies.speculation.adaptive_strategy import AdaptivePolicy
from tlt.policies.speculation.strategy_policy import Choice, ChoiceReason, StepObservation
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
    """Alternate between strategies, and record the observations of n-grams."""

    def __init__(self, *strategies: Strategy, why: ChoiceReason = "only") -> None:
        super().__init__()
        self._strategies = strategies
        self._why: ChoiceReason = why
        self._turn = 0
        self.probes, self.steps = Sums(), Sums()
        # batch sizes of the probes
        self.batches: set[int] = set()
        # tokens of each step
        self.kept: list[int] = []

    def choose(self, batch: int, context: int, random: float) -> Choice:
        self._turn += 1
        return Choice(self._strategies[self._turn % len(self._strategies)], 1.0, self._why)

    def observe(self, step: StepObservation) -> None:
        self.kept.append(1 + sum(step.accepted))
        if step.strategy == Ngram(tokens=MOST):
            self.steps.add(step.reached, step.accepted)

    def observe_probe(
        self, strategy: Strategy, batch: int, reached: Sequence[int], accepted: Sequence[int]
    ) -> None:
        assert strategy == Ngram(tokens=MOST)
        assert reached[0] > 0
        self.batches.add(batch)
        self.probes.add(reached, accepted)


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
        made.speculation.adopt_drafter(DrafterVersion(1), drafter)
    made.speculation.set_policy(strategies, 0)
    return made


def report(folder: Path, made: NativeEngine) -> None:
    """Swap weights, which makes the engine report its last counts."""
    made.swap_weights(PolicyVersion(1), load_decoder(folder, torch.float64).weights)


def expected_counts(written: Sequence[Sequence[int]], firsts: Sequence[int]) -> Sums:
    """Count the n-gram steps of successive answers, each after its first few tokens."""
    sums, index = Sums(), NgramIndex(1 << 20)
    for row, (answer, first) in enumerate(zip(written, firsts, strict=True)):
        index.begin(row, PROMPT, "group")
        read, at = 0, first
        while at < len(answer):
            index.extend(row, answer[read:at])
            drafts, rest = index.propose(row, MOST).tokens, answer[at : at + MOST]
            agree = [one == other for one, other in zip(drafts, rest, strict=False)]
            right = next((i for i, same in enumerate(agree) if not same), len(agree))
            reached = [int(depth <= right and depth < len(rest)) for depth in range(MOST)]
            sums.add(reached, [int(depth < right) for depth in range(MOST)])
            read, at = at, at + right + 1
        index.extend(row, answer[read:])
    return sums


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("tokens", [61, 100])
def test_probes_a_row_as_if_ngrams_decoded_it(
    policy: Path, sampling: Sampling, tokens: int
) -> None:
    """N-gram steps begin with the first token, probes after it."""
    submitted = [
        new_request(0, PROMPT, sampling, tokens),
        new_request(1, PROMPT, sampling, 12, member=0),
    ]
    followed, decoding = Always(Off()), Always(Ngram(tokens=MOST))
    for strategies in (followed, decoding):
        made = engine(policy, strategies)
        written = [answers(made, [request])[request.id].tokens for request in submitted]
        report(policy, made)
    assert sum(followed.probes.accepted) > 10
    assert followed.probes == expected_counts(written, (1, 1))
    assert followed.batches == {1}
    assert decoding.steps == expected_counts(written, (0, 0))
    assert decoding.probes == Sums()


@pytest.mark.parametrize("tokens", [61, 100])
def test_probes_do_not_depend_on_where_other_strategies_end_their_steps(
    policy: Path, drafter: Drafter, tokens: int
) -> None:
    """A step of the drafter may pass the ends of several probes."""
    submitted = [
        new_request(0, PROMPT, Sampling(), tokens),
        new_request(1, PROMPT, Sampling(), 12, member=0),
    ]
    strategies = Always(DRAFT)
    made = engine(policy, strategies, drafter)
    written, firsts = list[Sequence[int]](), list[int]()
    for request in submitted:
        steps = len(strategies.kept)
        written.append(answers(made, [request])[request.id].tokens)
        firsts.append(strategies.kept[steps])
    report(policy, made)
    assert max(strategies.kept) > 2
    assert sum(strategies.probes.accepted) > 5
    assert strategies.probes == expected_counts(written, firsts)


def test_control_runs_are_not_probed(policy: Path) -> None:
    strategies = Always(Off(), why="control")
    made = engine(policy, strategies)
    answers(made, [new_request(i, PROMPT, Sampling(), 40) for i in range(8)])
    report(policy, made)
    assert strategies.probes == Sums()


class Compared(Always):
    """Alternate between eight ordinary steps and a control run of eight."""

    @property
    def comparing(self) -> bool:
        return self._turn // 8 % 2 == 1

    def choose(self, batch: int, context: int, random: float) -> Choice:
        choice = super().choose(batch, context, random)
        return msgspec.structs.replace(choice, why="control") if self.comparing else choice


def test_probes_continue_after_a_control_run(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No n-grams are searched during a control run; probes continue at the end of the open one."""
    strategies, begun = Compared(Off()), list[bool]()
    look_up = NgramProposer.propose_row

    def propose_row(*args: Any) -> list[int]:
        begun.append(strategies.comparing)
        return look_up(*args)

    monkeypatch.setattr(NgramProposer, "propose_row", propose_row)
    made = engine(policy, strategies)
    written = answers(made, [new_request(0, PROMPT, GREEDY, 100)])[0].tokens
    report(policy, made)
    assert len(written) == 100
    assert len(begun) > 10
    assert not any(begun)
    assert strategies.probes == expected_counts([written], [1])


def test_probed_rows_may_move_end_and_be_cancelled(policy: Path) -> None:
    """Answers repeat one of two earlier ones: all drafts before an answer's end are accepted."""
    strategies = Always(Off(), Off(), Ngram(tokens=2))
    made = engine(policy, strategies)
    answers(made, [new_request(i, prompt, GREEDY, 60) for i, prompt in enumerate((PROMPT, OTHER))])
    report(policy, made)
    strategies.probes = Sums()
    prompts = (PROMPT, OTHER) * 12
    made.submit(
        [new_request(9 + i, prompt, GREEDY, 3 + 11 * i % 40) for i, prompt in enumerate(prompts)]
    )
    steps = 0
    while made.running:
        made.step()
        steps += 1
        if steps % 9 == 0:
            made.cancel([9 + steps % 24])
    report(policy, made)
    assert strategies.probes.reached[0] > 20
    assert strategies.batches <= set(range(1, 7))
    assert max(strategies.batches) > 1
    # a running sibling may have fewer tokens than a proposal needs, or none
    assert strategies.probes.accepted[0] > 0.9 * strategies.probes.reached[0]
    assert strategies.probes.accepted[1] == strategies.probes.reached[1]
