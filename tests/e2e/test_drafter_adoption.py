"""Workers without prompts train the drafter; the answers stay the same."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.live import Live
from tests.e2e.test_speculation import first_answers, write_drafter
from tlt.models.drafter_folder import TOKEN_MAP, load_drafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
    RolloutFinished,
)
from tlt.store.journal import JournalEntry

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]
# One worker has slots for all answers, so the other one is idle long enough to train, merge and
# adopt a drafter.
UNEVEN = (
    "algorithm.steps=3",
    "algorithm.prompts_per_step=24",
    "rollout.slots=96",
    "rollout.spread=false",
)
# steps enough for some evaluations to end before their step does: on a fast machine it takes half a
# second, on a slow one an evaluation takes as long as a rollout
MANY_STEPS = (
    *UNEVEN,
    "algorithm.steps=64",
    "algorithm.group_size=4",
)
SPECULATING = ("speculation.mode=adaptive", "speculation.depths=[2]", "speculation.ngrams=[]")
TRAINING = ("drafter.train=always", "drafter.merge_every=1")


@pytest.fixture(scope="module")
def trained(live: Live, long_spec: Path) -> str:
    """Train a drafter that proposes half of the vocabulary."""
    hot = "drafter.hot_tokens=16"
    job = live.submit(long_spec, *MANY_STEPS, *SPECULATING, *TRAINING, hot)
    live.tlt("logs", job, "-f", seconds=250.0)
    assert live.job(job)["status"] == "done", live.job(job)
    return job


def test_trains_on_unfinished_and_earlier_answers(live: Live, trained: str) -> None:
    journal = [entry.event for entry in live.journal(trained)]
    deltas = [event for event in journal if isinstance(event, DrafterDeltaReady)]
    assert deltas
    for event in deltas:
        assert event.updates > 0
        assert event.tokens.total > 0
        assert math.isfinite(event.loss)
        assert 0.0 < event.median_seconds < 10.0
    tokens = [event.tokens for event in deltas]
    # answers that the other worker is writing, and those of the step before
    assert sum(t.unfinished for t in tokens) > 0
    assert sum(t.earlier for t in tokens) > 0
    merged = [event for event in journal if isinstance(event, DrafterMerged)]
    assert merged
    assert [event.base.version for event in merged] == sorted(
        {event.base.version for event in merged}
    )
    # the first step may have no whole answer yet on which to evaluate a drafter
    measured = [event.evaluation for event in merged if event.evaluation.answers]
    assert measured
    assert all(evaluation.accept_length >= 1.0 for evaluation in measured)
    stopped = [event for event in journal if isinstance(event, DrafterTrainingStopped)]
    assert stopped


def test_draws_the_same_answers_as_without_training(
    live: Live, long_spec: Path, trained: str
) -> None:
    plain = live.submit(long_spec, *MANY_STEPS, "algorithm.steps=1")
    live.tlt("logs", plain, "-f", seconds=200.0)
    expected, found = (first_answers(live, job) for job in (plain, trained))
    assert {key: r.text for key, r in found.items()} == {key: r.text for key, r in expected.items()}


def test_shows_drafter_training_in_the_ledger(live: Live, trained: str) -> None:
    training = live.json("ledger", trained)["drafter_training"]
    assert 0 < training["idle_kept"] <= training["idle_used"]
    assert training["micro_batches"] > 0
    assert training["stops"] > 0
    assert training["stop_p99"] < 10
    deltas = [
        e for e in (n.event for n in live.journal(trained)) if isinstance(e, DrafterDeltaReady)
    ]
    assert training["longest_p95"] in {event.longest_seconds for event in deltas}
    shown = live.tlt("ledger", trained).stdout
    for words in ("idle device-seconds", "micro-batches", "stopped by command"):
        assert words in shown
    assert _versions(live.journal(trained)) <= {
        None,
        *(m["version"] for m in training["evaluations"]),
    }


def test_undoes_and_reports_a_drafter_that_diverged(
    live: Live, long_spec: Path, policy: Path, tmp_path: Path
) -> None:
    """The weights of the drafter are finite, but all its results are not."""
    file = write_drafter(policy, tmp_path) / "model.safetensors"
    save_file({name: 1e30 * tensor for name, tensor in load_file(file).items()}, file)
    settings = (*UNEVEN, *SPECULATING, *TRAINING, "algorithm.steps=2", f"drafter.path={tmp_path}")
    job = live.submit(long_spec, *settings)
    live.tlt("logs", job, "-f", seconds=200.0)
    assert live.job(job)["status"] == "done", live.job(job)
    events = [entry.event for entry in live.journal(job)]
    diverged = [event for event in events if isinstance(event, DrafterDiverged)]
    assert {event.error for event in diverged} == {"5 micro-batches in a row were not finite"}
    assert not any(isinstance(event, DrafterMerged) for event in events)
    line = f"{diverged[0].worker} discards its drafter training: {diverged[0].error}"
    assert line in live.tlt("logs", job).stdout
    assert f"drafter training discarded by {diverged[0].worker}: " in live.tlt("ledger", job).stdout
    assert live.json("ledger", job)["drafter_training"]["divergences"]


def _versions(journal: Sequence[JournalEntry]) -> set[int | None]:
    rollouts = [entry.event for entry in journal if isinstance(entry.event, RolloutFinished)]
    return {counts.drafter for rollout in rollouts for counts in rollout.accepted}


def test_exports_a_drafter_that_the_next_job_starts_with(
    live: Live, long_spec: Path, policy: Path, trained: str, tmp_path: Path
) -> None:
    folder = tmp_path / "drafter"
    live.tlt("export", "drafter", trained, str(folder))
    exported = load_drafter(folder, 2)
    assert exported.config.layout == "eagle"
    assert exported.config.hot_tokens == 16
    assert f"--speculative-token-map THIS_FOLDER/{TOKEN_MAP}" in (folder / "README.md").read_text()
    assert (folder / TOKEN_MAP).is_file()
    assert "accept length" in (folder / "README.md").read_text()
    live.tlt("export", "drafter", trained, str(folder), code=2)
    again = live.submit(
        long_spec, *UNEVEN, *SPECULATING, "algorithm.steps=1", f"drafter.path={folder}"
    )
    live.tlt("logs", again, "-f", seconds=200.0)
    assert live.job(again)["status"] == "done"
    assert 0 in _versions(live.journal(again))
