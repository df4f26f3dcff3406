"""Workers that have nothing left to decode train the drafter; the answers stay what they were."""

import math
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.live import Live, kill, wait_until
from tests.e2e.test_speculation import drafter_of, first_step
from tlt.models.drafter_folder import load_drafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
    PolicyPublished,
    RolloutFinished,
    WorkerIdled,
    WorkerLost,
)
from tlt.store.journal import JournalEntry

pytestmark = pytest.mark.timeout(300)
# as many answers as one worker has slots: it takes them all, and the other has nothing to do
# for far longer than anything takes that it could do with the drafter
UNEVEN = (
    "algorithm.steps=3",
    "algorithm.prompts_per_step=8",
    "rollout.slots=32",
    "rollout.spread=false",
)
SPECULATING = ("speculation.mode=adaptive", "speculation.depths=[2]", "speculation.ngrams=[]")
TRAINING = ("drafter.train=always", "drafter.merge_every=1")


@pytest.fixture(scope="module")
def trained(live: Live, long_spec: Path) -> str:
    job = live.submit(long_spec, *UNEVEN, *SPECULATING, *TRAINING)
    live.tlt("logs", job, "-f", seconds=200.0)
    assert live.job(job)["status"] == "done", live.job(job)
    return job


def test_idle_workers_train_and_say_what_from(live: Live, trained: str) -> None:
    journal = [entry.event for entry in live.journal(trained)]
    learned = [event for event in journal if isinstance(event, DrafterDeltaReady)]
    assert learned
    for event in learned:
        assert event.updates > 0
        assert event.tokens.total > 0
        assert math.isfinite(event.loss)
        assert 0.0 < event.typical_seconds < 10.0
    tokens = [event.tokens for event in learned]
    # what the other one is still writing, and wrote in the step before
    assert sum(t.running for t in tokens) > 0
    assert sum(t.previous for t in tokens) > 0
    merged = [event for event in journal if isinstance(event, DrafterMerged)]
    assert merged
    assert [event.base.version for event in merged] == sorted(
        {event.base.version for event in merged}
    )
    # in the first step nothing may be whole yet that a drafter could be measured by
    measured = [event.evaluation for event in merged if event.evaluation.answers]
    assert measured
    assert all(evaluation.trained >= 1.0 for evaluation in measured)
    stopped = [event for event in journal if isinstance(event, DrafterTrainingStopped)]
    assert stopped


def test_the_answers_are_those_without(live: Live, long_spec: Path, trained: str) -> None:
    plain = live.submit(long_spec, *UNEVEN, "algorithm.steps=1")
    live.tlt("logs", plain, "-f", seconds=200.0)
    expected, found = (first_step(live.journal(job)) for job in (plain, trained))
    assert {key: r.text for key, r in found.items()} == {key: r.text for key, r in expected.items()}


def test_the_ledger_tells_of_it(live: Live, trained: str) -> None:
    drafting = live.json("ledger", trained)["drafting"]
    assert 0 < drafting["harvested"] <= drafting["idle_used"]
    assert drafting["micro_batches"] > 0
    assert drafting["preempted"] > 0
    assert drafting["preempt_p99"] < 10
    learned = [
        e for e in (n.event for n in live.journal(trained)) if isinstance(e, DrafterDeltaReady)
    ]
    assert drafting["longest_p95"] in {event.longest_seconds for event in learned}
    shown = live.tlt("ledger", trained).stdout
    for words in ("idle device-seconds", "micro-batches", "stopped when told"):
        assert words in shown
    assert _versions(live.journal(trained)) <= {None, *(m["version"] for m in drafting["measured"])}


def test_what_is_trained_and_is_no_number_is_undone_and_told_of(
    live: Live, long_spec: Path, policy: Path, tmp_path: Path
) -> None:
    """A drafter whose weights are numbers, but nothing that is computed with them."""
    file = drafter_of(policy, tmp_path) / "model.safetensors"
    save_file({name: 1e30 * tensor for name, tensor in load_file(file).items()}, file)
    settings = (*UNEVEN, *SPECULATING, *TRAINING, "algorithm.steps=2", f"drafter.path={tmp_path}")
    job = live.submit(long_spec, *settings)
    live.tlt("logs", job, "-f", seconds=200.0)
    assert live.job(job)["status"] == "done", live.job(job)
    events = [entry.event for entry in live.journal(job)]
    spoiled = [event for event in events if isinstance(event, DrafterDiverged)]
    assert {event.error for event in spoiled} == {"5 lessons in a row were not finite"}
    assert not any(isinstance(event, DrafterMerged) for event in events)
    told = f"{spoiled[0].worker} gives up what it trained: {spoiled[0].error}"
    assert told in live.tlt("logs", job).stdout
    assert f"undone, as said by {spoiled[0].worker}: " in live.tlt("ledger", job).stdout
    assert live.json("ledger", job)["drafting"]["spoiled"]


def test_a_worker_that_goes_on_training_gets_fresh_ranks(live: Live, long_spec: Path) -> None:
    """One of its ranks stands still; caught while it does something else, another one does."""
    job = live.submit(
        long_spec,
        *UNEVEN,
        *SPECULATING,
        *TRAINING,
        *("algorithm.steps=50", "algorithm.collective_timeout_seconds=5"),
        *("drafter.preempt_seconds=1", "workers.stuck_seconds=60", "workers.max_restarts=50"),
    )
    for _ in range(5):
        losses = len(_lost(live, job))
        _stop_a_learner(live, job)
        wait_until(lambda known=losses: len(_lost(live, job)) > known, "it to be missed")
        if any("trained on" in reason for reason in _lost(live, job)):
            break
    assert any("trained on" in reason for reason in _lost(live, job))
    assert "its ranks trained on" in live.tlt("logs", job).stdout
    step = live.fold(job).step
    wait_until(lambda: live.fold(job).step > step, "the job to go on")
    live.tlt("cancel", job)
    assert live.ended(job)["status"] == "cancelled"
    live.await_workers(2)


def _stop_a_learner(live: Live, job: str) -> None:
    """Workers tell of their ranks once a heartbeat: those may be gone, and others there."""

    def stops() -> bool:
        learner = _learns(live, job)
        told = None if learner is None else live.workers().get(learner)
        if told is None or not told.rank_pids:
            return False
        try:
            kill(told.rank_pids[0], signal.SIGSTOP)
        except ProcessLookupError:
            return False
        return True

    wait_until(stops, "somebody to learn")


def _learns(live: Live, job: str) -> str | None:
    """Who alone has nothing to decode, and has been told to train: what it learns is told later."""
    idle: list[str] = []
    if (live.runs / job / "journal.jsonl").exists():
        for entry in live.journal(job):
            if isinstance(entry.event, WorkerIdled):
                idle.append(entry.event.worker)
            elif isinstance(entry.event, DrafterTrainingStopped | WorkerLost | PolicyPublished):
                idle = []
    return idle[0] if len(idle) == 1 else None


def _lost(live: Live, job: str) -> list[str]:
    events = (entry.event for entry in live.journal(job))
    return [event.reason for event in events if isinstance(event, WorkerLost)]


def _versions(journal: Sequence[JournalEntry]) -> set[int | None]:
    rollouts = [entry.event for entry in journal if isinstance(entry.event, RolloutFinished)]
    return {span.version for rollout in rollouts for span in rollout.drafters}


def test_the_drafter_is_taken_out_and_the_next_job_begins_with_it(
    live: Live, long_spec: Path, policy: Path, trained: str, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    live.tlt("export", "drafter", trained, str(folder))
    assert load_drafter(folder, 2).config.layout == "eagle"
    assert "accept length" in (folder / "README.md").read_text()
    live.tlt("export", "drafter", trained, str(folder), code=2)
    again = live.submit(
        long_spec, *UNEVEN, *SPECULATING, "algorithm.steps=1", f"drafter.path={folder}"
    )
    live.tlt("logs", again, "-f", seconds=200.0)
    assert live.job(again)["status"] == "done"
    assert 0 in _versions(live.journal(again))
