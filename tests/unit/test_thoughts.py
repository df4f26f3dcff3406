"""Only what follows a finished thought is judged, by every verifier that is built in."""

from pathlib import Path
from typing import Any

import pytest

from tlt.data.thoughts import TAGS, opens_thought, text_after_thoughts
from tlt.rewards.process.request_scorer import load_scorer
from tlt.rewards.process.reward_pool import RewardPool
from tlt.rewards.reward_messages import ScoreRequest, ScoreResult
from tlt.spec.reward import RewardSpec

# a right answer, and one that is wrong
VERIFIED = [
    (RewardSpec(kind="final_answer"), "#7", "#8"),
    (RewardSpec(kind="numeric"), "7", "8"),
    (RewardSpec(kind="math"), r"\boxed{7}", r"\boxed{8}"),
    (RewardSpec(kind="regex", pattern=r"is (\d)"), "it is 7", "it is 8"),
    (RewardSpec(kind="boxed"), r"\boxed{7}", r"\boxed{8}"),
    (RewardSpec(kind="code"), "```python\nx = 7\n```", "```python\nx = 8\n```"),
]


def score(spec: RewardSpec, text: str, in_thought: bool = False) -> ScoreResult:
    answer = "assert x == 7" if spec.kind == "code" else "7"
    request = ScoreRequest(
        completion=text, answer=answer, row={}, known={"in_thought": in_thought}, extract=True
    )
    (result,) = load_scorer(spec).score([request])
    assert result.error is None
    return result


@pytest.mark.parametrize(("spec", "right", "wrong"), VERIFIED, ids=lambda each: str(each)[:20])
def test_an_unfinished_thought_has_no_answer(spec: RewardSpec, right: str, wrong: str) -> None:
    assert score(spec, right).reward == 1
    for result in (score(spec, right, in_thought=True), score(spec, f"<think>{right}")):
        assert (result.reward, result.final) == (0, None)


@pytest.mark.parametrize(("spec", "right", "wrong"), VERIFIED, ids=lambda each: str(each)[:20])
def test_only_what_follows_the_thought_is_judged(spec: RewardSpec, right: str, wrong: str) -> None:
    assert score(spec, f"{wrong}</think>\n{right}", in_thought=True).reward == 1
    assert score(spec, f"<think>{wrong}</think>\n{right}").reward == 1
    for after in ("", " I give up.", f" So:\n{wrong}"):
        assert score(spec, f"{right}</think>{after}", in_thought=True).reward == 0
        assert score(spec, f"<think>{right}</think>{after}").reward == 0


@pytest.mark.parametrize(("opening", "end"), TAGS.items())
def test_knows_the_tags_in_use(opening: str, end: str) -> None:
    assert opens_thought(f"2+2=\n{opening}\n")
    assert not opens_thought(f"2+2=\n{opening}\n\n{end}\n\n")
    assert not opens_thought(f"Write {opening} before you think. 2+2=")
    assert text_after_thoughts(f"3{end}4", in_thought=True) == "4"
    assert text_after_thoughts(f"{opening}3{end}4{opening}5", in_thought=False) is None


async def test_a_process_that_scores_is_told_of_the_thought(tmp_path: Path) -> None:
    async def scored(spec: RewardSpec, answer: Any) -> list[float | None]:
        pool = RewardPool(spec, tmp_path / "log", 1)
        known = {"in_thought": lambda: True}
        try:
            return [
                (await pool.score(text, answer, {}, known)).reward for text in ("7", "1</think>7")
            ]
        finally:
            await pool.stop()

    (tmp_path / "own.py").write_text("def reward(completion, **_):\n    return len(completion)\n")
    assert await scored(RewardSpec(kind="numeric"), "7") == [0, 1]
    # a function of one's own gets the whole answer
    own = RewardSpec(kind="function", function=f"{tmp_path}/own.py:reward")
    assert await scored(own, None) == [1, 10]
