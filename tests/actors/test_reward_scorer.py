"""An answer that was lost gets the configured fallback, so that no rollout batch waits for it."""

from pathlib import Path

import msgspec

from tests.samples import JOB, SPEC, answer, written_answer
from tlt.actors.reward_scorer import JobScorer
from tlt.answer_files import AnswerFiles
from tlt.config import RewardSpec
from tlt.dataset import Prompt, Prompts, prompts_file
from tlt.store.job_records import new_record


async def test_scores_an_answer_and_gives_a_lost_one_the_fallback(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, reward=RewardSpec(kind="numeric", on_error=-2.0))
    row = Prompt(tokens=(1, 2), answer="7", row={})
    Prompts.write(prompts_file(tmp_path, "train"), [row] * 8)
    written = AnswerFiles(tmp_path).writer("3.0").append(written_answer([7], text="#### 7"))
    whole = msgspec.structs.replace(answer(0), answer=written)
    scorer = JobScorer(new_record(JOB, spec, str(tmp_path)))
    try:
        scored = await scorer.score(whole)
        (tmp_path / "answers" / "3.0").unlink()
        lost = await scorer.score(whole)
    finally:
        scorer.close()
    assert (scored.reward, scored.error) == (1.0, None)
    assert lost.reward == -2.0
    assert lost.error is not None
    assert "cannot be read" in lost.error
