"""The best policy is found by prompts that both have answered, and luck decides less that way."""

import math
from collections.abc import Sequence
from random import Random
from statistics import mean, stdev

import msgspec
import pytest

from tests.simulation.specs import small_spec
from tests.simulation.started_run import started_run
from tlt.base.id_types import Attempt, Digest, PolicyVersion, PromptIndex, Step
from tlt.policies.run import best_policy
from tlt.policies.run.evaluation_answers import answers_by_prompt
from tlt.policies.run.policy_comparison import Difference, compare
from tlt.policies.run.rollout_batch import Answer, Group, RolloutBatch, Score
from tlt.policies.run.run_state import RunState, Turn
from tlt.protocol.commands import CommitBestPolicy
from tlt.protocol.refs import BlobRef, PolicyRef
from tlt.protocol.shared_values import PromptSet

Rewards = Sequence[Sequence[float | None]]
FIRST = Attempt(0)


def evaluate(state: RunState, version: int, rewards: Rewards) -> tuple[RunState, bool]:
    """Return the state after an evaluation with these rewards by prompt, and if it was kept."""
    weights = BlobRef(digest=Digest(f"weights {version}"), bytes=1)
    policy = msgspec.structs.replace(
        state.policy,
        version=PolicyVersion(version),
        current=PolicyRef(version=PolicyVersion(version), weights=weights),
    )
    groups = {
        PromptIndex(index): Group(
            tuple(Answer(finished=FIRST, length=1, scores=(Score(FIRST, r),)) for r in each)
        )
        for index, each in enumerate(rewards)
    }
    turn = Turn(msgspec.structs.replace(state, policy=policy), 0.0)
    batch = RolloutBatch(step=Step(version), purpose="eval", groups=groups, unsettled=0)
    best_policy.keep_best(turn, batch)
    return turn.state, any(isinstance(command, CommitBestPolicy) for command in turn.commands)


def run_with(confidence: float = 0.5, *sets: PromptSet) -> RunState:
    spec = small_spec()
    algorithm = msgspec.structs.replace(spec.algorithm, keep_best_confidence=confidence)
    state, _ = started_run(msgspec.structs.replace(spec, algorithm=algorithm))
    return msgspec.structs.replace(state, eval_sets=sets or (PromptSet(name="easy", prompts=4),))


def best_of(state: RunState) -> int:
    assert state.policy.best is not None
    return state.policy.best.version


def test_keeps_the_higher_mean_and_the_older_of_equals() -> None:
    state, kept = evaluate(run_with(), 1, [[1.0], [0.0], [0.0], [0.0]])
    assert kept
    state, kept = evaluate(state, 2, [[0.0], [1.0], [0.0], [0.0]])
    assert not kept
    state, kept = evaluate(state, 3, [[0.0], [1.0], [1.0], [0.0]])
    assert kept
    assert best_of(state) == 3


def test_compares_on_prompts_that_both_have_answered() -> None:
    """The mean of the second policy is higher only because it lacks the hardest prompt."""
    state, _ = evaluate(run_with(), 1, [[1.0], [1.0], [1.0], [0.0]])
    state, kept = evaluate(state, 2, [[1.0], [1.0], [1.0], [None]])
    assert not kept
    _, kept = evaluate(state, 3, [[None], [None], [None], [1.0]])
    assert kept


def test_every_set_counts_the_same() -> None:
    sets = PromptSet(name="hard", prompts=1), PromptSet(name="easy", prompts=3)
    state = run_with(0.5, *sets)
    assert answers_by_prompt(state) == (2, 1, 1, 1)
    state, _ = evaluate(state, 1, [[0.0, 0.0], [1.0], [1.0], [0.0]])
    state, kept = evaluate(state, 2, [[0.0, 1.0], [1.0], [0.0], [0.0]])
    assert kept  # half a point of the one prompt outweighs a third of the other set
    assert state.policy.best is not None
    assert state.policy.best.mean == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_a_confidence_asks_for_more_than_a_higher_mean() -> None:
    before, after = [[0.0], [0.0], [1.0], [0.0]], [[1.0], [0.0], [1.0], [0.0]]
    for confidence, expected in ((0.5, True), (0.75, True), (0.95, False)):
        state, _ = evaluate(run_with(confidence), 1, before)
        assert evaluate(state, 2, after)[1] is expected
    state, _ = evaluate(run_with(0.95), 1, before)
    assert evaluate(state, 2, [[1.0]] * 4)[1]


def test_runs_of_earlier_versions_keep_what_they_kept() -> None:
    """Their journals name no set, and the weights that they kept had the highest mean."""
    state = run_with(0.95, PromptSet(name="", prompts=4))
    state, _ = evaluate(state, 1, [[1.0], [1.0], [1.0], [0.0]])
    state, kept = evaluate(state, 2, [[1.0], [1.0], [1.0], [None]])
    assert kept


# --- the comparison -----------------------------------------------------------------------------


def test_the_difference_has_the_error_of_the_differences() -> None:
    before, after = (0.0, 1.0, 1.0, 0.0, 0.5), (0.0, 1.0, 1.0, 1.0, 1.0)
    differences = [b - a for a, b in zip(before, after, strict=True)]
    found = compare({"easy": before}, {"easy": after})
    assert found == Difference(
        value=pytest.approx(mean(differences)),
        standard_error=pytest.approx(stdev(differences) / math.sqrt(5)),
        degrees=pytest.approx(4.0),
    )
    # Student's t of four degrees at 97.5 % is 2.776
    low, high = found.interval(0.95)
    assert found.standard_error is not None
    assert (high - low) / 2 == pytest.approx(2.776 * found.standard_error, rel=0.01)


def test_a_single_prompt_gives_no_interval() -> None:
    found = compare({"one": (0.0,)}, {"one": (1.0,)})
    assert found is not None
    assert (found.value, found.low(0.5), found.low(0.75)) == (1.0, 1.0, -math.inf)
    assert compare({"one": (None,)}, {"one": (1.0,)}) is None


@pytest.mark.parametrize(
    ("degrees", "probability", "expected"),
    [(1, 0.95, 6.314), (2, 0.975, 4.303), (3, 0.95, 2.353), (10, 0.9, 1.372), (1e9, 0.95, 1.645)],
)
def test_bounds_have_students_quantiles(
    degrees: float, probability: float, expected: float
) -> None:
    difference = Difference(value=0.0, standard_error=1.0, degrees=degrees)
    assert -difference.low(probability) == pytest.approx(expected, rel=0.01)


# --- noise --------------------------------------------------------------------------------------


def test_the_same_noise_keeps_better_policies_than_fresh_noise() -> None:
    """A policy answers a prompt if its chance exceeds the noise.

    Over 40 simulated jobs the policy that is kept is 2.0 points worse than the best one by fresh
    noise in each evaluation, and 1.2 points by the same; where training makes the policy worse, 2.0
    and 0.5 points.
    """
    for drift in (0.6, -0.6):
        fresh, same = (_mean_regret(drawn, 0.5, drift) for drawn in (True, False))
        assert same < 0.7 * fresh


def test_a_confidence_pays_only_where_training_makes_the_policy_worse() -> None:
    """A higher mean loses 2.0 points against 5.5 where training makes it better."""
    higher, surer = (_mean_regret(True, level, -0.6) for level in (0.5, 0.95))
    assert surer < 0.5 * higher
    higher, surer = (_mean_regret(True, level, 0.6) for level in (0.5, 0.95))
    assert higher < 0.5 * surer


def _mean_regret(fresh: bool, confidence: float, drift: float) -> float:
    """Return by how much the kept policies are worse than the best ones, over simulated jobs."""
    return mean(_regret(Random(seed), fresh, confidence, drift) for seed in range(40))


def _regret(random: Random, fresh: bool, confidence: float, drift: float) -> float:
    prompts, evaluations = 60, 7
    state = run_with(confidence, PromptSet(name="easy", prompts=prompts))
    levels = [random.gauss(0.0, 1.5) for _ in range(prompts)]
    noise = [random.random() for _ in range(prompts)]
    true: list[float] = []
    for version in range(evaluations):
        if version:
            levels = [level + random.gauss(drift / evaluations, 0.2) for level in levels]
        chances = [1.0 / (1.0 + math.exp(-level)) for level in levels]
        true.append(mean(chances))
        if fresh:
            noise = [random.random() for _ in range(prompts)]
        rewards = [[float(u < p)] for u, p in zip(noise, chances, strict=True)]
        state, _ = evaluate(state, version, rewards)
    return max(true) - true[best_of(state)]
