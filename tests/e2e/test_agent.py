"""An agent that knows the `openai` package alone is trained, whatever is killed meanwhile."""

from pathlib import Path

import pytest

from tests.e2e.live import Live, count_dropped, counted_rollouts, kill, wait_until
from tests.e2e.test_environment import answers, environments_of
from tlt.runs.run_folder_reader import open_ledger

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
SPEC = Path(__file__).parents[2] / "examples" / "agent" / "job.yaml"
STEPS, PROMPTS, GROUP = 2, 4, 4
CHANGES = (
    f"algorithm.steps={STEPS}",
    f"algorithm.prompts_per_step={PROMPTS}",
    f"algorithm.group_size={GROUP}",
    "algorithm.eval_every=0",
)


def assert_complete(live: Live, job: str) -> None:
    assert live.await_end(job, 200.0)["status"] == "done", live.job(job)["error"]
    counted = counted_rollouts(live.journal(job), open_ledger(live.runs / job))
    assert len(counted) == len(set(counted)) == STEPS * PROMPTS * GROUP
    assert count_dropped(live.journal(job)) == 0
    conversations = 0
    for event, answer in answers(live, job):
        assert answer.error is None
        parts = (answer, *answer.branches)
        assert event.length == sum(len(part.logprobs) for part in parts)
        conversations += len(parts)
    assert conversations > STEPS * PROMPTS * GROUP
    for step in live.fold(job).steps:
        assert step.metrics is not None
        # the learner's log-probs of the tokens that the engine has sampled
        assert step.metrics.sampling_kl < 1e-6


def test_nothing_is_lost_with_agents_and_the_endpoint(live: Live) -> None:
    """An agent is killed, and a worker, whose process serves the endpoint."""
    live.await_workers(2)
    job = live.submit(SPEC, *CHANGES)
    live.await_phase(job, "rollout", 0)
    wait_until(lambda: len(environments_of(live)) > 3, "agents")
    kill(environments_of(live)[-1])
    live.await_phase(job, "rollout", 1)
    kill(live.workers()["w1"].pid)
    assert_complete(live, job)
    assert "(conversation 2)" in live.tlt("samples", job).stdout


def test_sglang_trains_an_agent(alone: Live) -> None:
    job = alone.submit(SPEC, *CHANGES, "rollout.engine=sglang", "speculation.mode=off")
    assert_complete(alone, job)
