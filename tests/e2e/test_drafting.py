"""Workers that have nothing left to decode train the drafter; the answers stay what they were."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.live import Live
from tests.e2e.test_speculation import first_step
from tlt.messages import DrafterLearned, DrafterPreempted, DrafterTrained, RolloutFinished
from tlt.models.drafter_folder import load_drafter
from tlt.store.journal import JournalEntry

pytestmark = pytest.mark.timeout(300)
# as many answers as one worker has slots: it takes them all, and the other has nothing to do
UNEVEN = ("algorithm.steps=3", "algorithm.prompts_per_step=1", "rollout.slots=4")
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
    learned = [event for event in journal if isinstance(event, DrafterLearned)]
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
    merged = [event for event in journal if isinstance(event, DrafterTrained)]
    assert merged
    assert [event.trunk.version for event in merged] == sorted(
        {event.trunk.version for event in merged}
    )
    # in the first step nothing may be whole yet that a drafter could be measured by
    measured = [event.canary for event in merged if event.canary.answers]
    assert measured
    assert all(canary.trained >= 1.0 for canary in measured)
    stopped = [event for event in journal if isinstance(event, DrafterPreempted)]
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
    shown = live.tlt("ledger", trained).stdout
    for words in ("idle device-seconds", "micro-batches", "stopped when told"):
        assert words in shown
    assert _versions(live.journal(trained)) <= {None, *(m["version"] for m in drafting["measured"])}


def _versions(journal: Sequence[JournalEntry]) -> set[int | None]:
    rollouts = [entry.event for entry in journal if isinstance(entry.event, RolloutFinished)]
    return {span.version for rollout in rollouts for span in rollout.drafters}


def test_the_drafter_is_taken_out_and_the_next_job_begins_with_it(
    live: Live, long_spec: Path, policy: Path, trained: str, tmp_path: Path
) -> None:
    drafting = live.json("ledger", trained)["drafting"]
    if not any(made["adopted"] for made in drafting["measured"]):
        refused = live.tlt("export", "drafter", trained, str(tmp_path / "drafter"), code=2)
        assert "no drafter of its own making" in refused.stderr
        return
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
