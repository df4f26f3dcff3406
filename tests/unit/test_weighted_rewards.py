"""Several rewards are added up by their weights; what failed or doesn't apply is no score."""

from pathlib import Path

import msgspec
import pytest

from tlt.errors import ConfigError
from tlt.rewards.process.weighted_rewards import Verdict, WeightedRewards, combine
from tlt.rewards.reward_messages import ScoreResult
from tlt.spec.reward import RewardSpec
from tlt.spec.spec_files import load_rewards

TWO = (RewardSpec(kind="numeric", weight=2.0), RewardSpec(kind="boxed", weight=-0.5))


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ((1.0, 1.0), Verdict(reward=1.5, parts=(1.0, 1.0), correct=True)),
        ((1.0, None), Verdict(reward=2.0, parts=(1.0, None), correct=True)),
        ((None, None), Verdict(parts=(None, None))),
        ((1.0, "x"), Verdict(error="boxed: x", parts=(1.0, None))),
        (("y", "x"), Verdict(error="numeric: y; boxed: x", parts=(None, None))),
    ],
)
def test_adds_up_what_applies(results: tuple[float | str | None, ...], expected: Verdict) -> None:
    given = [
        ScoreResult(error=result) if isinstance(result, str) else ScoreResult(reward=result)
        for result in results
    ]
    assert combine(TWO, given) == expected


JUDGED = RewardSpec(kind="url", url="http://x")


@pytest.mark.parametrize(
    ("specs", "parts", "correct"),
    [
        # style adds to the sum, and doesn't make an answer right or wrong
        ((RewardSpec(kind="math"), JUDGED), (0.0, 5.0), False),
        ((RewardSpec(kind="math", weight=0.5), JUDGED), (1.0, 0.0), True),
        ((RewardSpec(kind="math"), RewardSpec(kind="boxed")), (1.0, 0.0), False),
        # a share of the tests
        ((RewardSpec(kind="code", partial=True, weight=3.0),), (0.9,), False),
        ((RewardSpec(kind="url", url="http://x", correct_at=0.5),), (0.5,), True),
        ((RewardSpec(kind="math", correct_at=0.0),), (0.0,), True),
        # none that applies decides
        ((RewardSpec(kind="math"), JUDGED), (None, 1.0), True),
        ((JUDGED,), (0.9,), False),
        ((JUDGED,), (None,), None),
    ],
)
def test_an_answer_is_right_by_the_rewards_that_decide_on_it(
    specs: tuple[RewardSpec, ...], parts: tuple[float | None, ...], correct: bool | None
) -> None:
    assert combine(specs, [ScoreResult(reward=part) for part in parts]).correct is correct


def test_takes_the_final_answer_of_the_first_reward_that_extracts_it() -> None:
    specs = (RewardSpec(kind="url", url="http://x"), *TWO)
    scores = [ScoreResult(reward=1.0, final=final) for final in (None, "7", "8")]
    assert combine(specs, scores).final == "7"
    assert combine(specs[:1], scores[:1]).final is None


def test_a_fallback_counts_as_the_spec_says() -> None:
    failed = ScoreResult(reward=-1.0, error="x")
    assert combine(TWO[:1], [failed]) == Verdict(reward=-2.0, error="x", correct=False)


async def test_scores_with_all_rewards(tmp_path: Path) -> None:
    rewards = WeightedRewards(TWO, tmp_path / "log")
    try:
        verdict = await rewards.score(r"\boxed{8} or 7", "7", {})
    finally:
        await rewards.stop()
    assert verdict == Verdict(reward=2.0, parts=(1.0, 0.0), correct=False)


async def test_runs_no_reward_that_does_not_apply(tmp_path: Path) -> None:
    missing = RewardSpec(kind="function", function="no.such:name", sources=("code",))
    rewards = WeightedRewards((missing, *TWO), tmp_path / "log")
    try:
        verdict = await rewards.score("7", "7", {}, extract=True, sources=("sums",))
        failed = await rewards.score("7", "7", {}, sources=("sums", "code"))
    finally:
        await rewards.stop()
    assert verdict == Verdict(reward=2.0, parts=(None, 1.0, 0.0), correct=False, final="7.0")
    assert failed.error is not None
    assert failed.error.startswith("function: ")


async def test_the_final_answer_is_that_of_a_reward_that_applies(tmp_path: Path) -> None:
    boxed, numeric = TWO[1], msgspec.structs.replace(TWO[0], sources=("sums",))
    rewards = WeightedRewards((numeric, boxed), tmp_path / "log")
    try:
        verdict = await rewards.score(r"\boxed{8} or 7", "7", {}, extract=True, sources=("x",))
    finally:
        await rewards.stop()
    assert (verdict.parts, verdict.final) == ((None, 0.0), "8")


SPEC = "reward:\n  - kind: numeric\n  - {kind: numeric, name: close, tolerance: 0.1, weight: 0.5}\n"


def test_reads_the_rewards_of_a_spec_alone(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("policy: {nonsense: 1}\n" + SPEC)
    found = load_rewards(file, ["reward.1.weight=2"])
    assert [(reward.label, reward.weight) for reward in found] == [("numeric", 1.0), ("close", 2.0)]


@pytest.mark.parametrize(
    ("text", "change", "complaint"),
    [
        (SPEC, "reward.1.tolerence=1", "reward.1.tolerence: unknown key; did you mean 'tolerance'"),
        (SPEC, "reward.2.weight=1", "2 is none of 0 to 1"),
        (SPEC, "reward.kind=numeric", "name a key of one of the list"),
        (SPEC, "reward.1.name=null", "'numeric' is there twice"),
        ("reward: []", "", "the list is empty"),
        ("reward: {kind: code, timeout_seconds: 0}", "", "timeout_seconds must be above 0"),
        ("policy: {}", "", "reward"),
    ],
)
def test_names_what_is_wrong_in_a_list(
    tmp_path: Path, text: str, change: str, complaint: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_rewards(file, [change] if change else [])
    assert complaint in str(error.value)
