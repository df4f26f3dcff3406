"""Workers without prompts train the drafter; the answers stay the same."""

import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.live import Live, kill, wait_until
from tests.e2e.test_speculation import PROPOSING, first_answers, write_drafter
from tlt.models.drafter_folder import TOKEN_MAP, load_drafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
    RolloutFinished,
)
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.runs.run_folder_reader import read_ledger
from tlt.store.journal import JournalEntry

E = TypeVar("E")
pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
# One worker has slots for all answers, so the other one is idle and trains, merges and adopts a
# drafter, in one step or the other.
UNEVEN = (
    "algorithm.prompts_per_step=24",
    "algorithm.group_size=4",
    "rollout.slots=96",
    "rollout.spread=false",
)
# until it is cancelled
ENDLESS = (*UNEVEN, "algorithm.steps=100000")
SPECULATING = ("speculation.mode=adaptive", "speculation.depths=[2]", "speculation.ngrams=[]")
TRAINING = ("drafter.train=always", "drafter.merge_every=1")


@pytest.fixture(scope="module")
def trained(live: Live, long_spec: Path) -> str:
    """Train a drafter of half of the vocabulary until it was evaluated, adopted and stopped.

    It learns from answers that the other worker is writing, and from those of earlier steps.
    """
    job = live.submit(long_spec, *ENDLESS, *SPECULATING, *TRAINING, "drafter.hot_tokens=16")
    live.await_phase(job, "rollout", step=1)

    def was_adopted() -> bool:
        journal = live.journal(job)
        tokens = [event.tokens for event in of(DrafterDeltaReady, journal)]
        return bool(
            any(t.unfinished for t in tokens)
            and any(t.earlier for t in tokens)
            and of(DrafterTrainingStopped, journal)
            and read_ledger(live.runs / job).state.drafter.adoption.used is not None
        )

    while not was_adopted():
        hold_decoding_until_evaluated(live, job)
    return cancelled(live, job)


def hold_decoding_until_evaluated(live: Live, job: str) -> None:
    """Stop the ranks that decode until the other worker has evaluated another drafter.

    On some machines no step is long enough for that.
    """
    before, held = len(measured(live.journal(job))), list[int]()

    def decodes() -> bool:
        beats = live.workers().values()
        held[:] = [pid for beat in beats if beat.running for pid in beat.rank_pids]
        return bool(held)

    wait_until(decodes, "a worker to decode")
    for pid in held:
        kill(pid, signal.SIGSTOP)
    try:
        wait_until(
            lambda: (
                len(measured(live.journal(job))) > before
                # it had no answer left
                or live.fold(job).phase.value != "rollout"
            ),
            "a drafter to be evaluated",
        )
    finally:
        for pid in held:
            kill(pid, signal.SIGCONT)


def cancelled(live: Live, job: str) -> str:
    live.tlt("cancel", job)
    assert live.await_end(job)["status"] == "cancelled"
    return job


def of(kind: type[E], journal: Sequence[JournalEntry]) -> list[E]:
    return [entry.event for entry in journal if isinstance(entry.event, kind)]


def measured(journal: Sequence[JournalEntry]) -> list[DrafterEvaluation]:
    """Return the evaluations of drafters; without a whole answer there is nothing to measure."""
    found = [event.evaluation for event in of(DrafterMerged, journal)]
    return [evaluation for evaluation in found if evaluation.answers]


def test_trains_and_measures_a_drafter(live: Live, trained: str) -> None:
    journal = live.journal(trained)
    for event in of(DrafterDeltaReady, journal):
        assert event.updates > 0
        assert event.tokens.total > 0
        assert math.isfinite(event.loss)
        assert 0.0 < event.median_seconds < 10.0
    versions = [event.base.version for event in of(DrafterMerged, journal)]
    assert versions == sorted(set(versions))
    assert all(evaluation.accept_length >= 1.0 for evaluation in measured(journal))


def test_draws_the_same_answers_as_without_training(
    live: Live, long_spec: Path, trained: str
) -> None:
    plain = live.submit(long_spec, *UNEVEN, "algorithm.steps=1")
    assert live.await_end(plain)["status"] == "done", live.job(plain)
    expected, found = (first_answers(live, job) for job in (plain, trained))
    assert {key: r.text for key, r in found.items()} == {key: r.text for key, r in expected.items()}


def test_shows_drafter_training_in_the_ledger(live: Live, trained: str) -> None:
    training = live.json("ledger", trained)["drafter_training"]
    assert 0 < training["idle_kept"] <= training["idle_used"]
    assert training["micro_batches"] > 0
    assert training["stops"] > 0
    assert training["stop_p99"] < 10
    deltas = of(DrafterDeltaReady, live.journal(trained))
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
    job = live.submit(long_spec, *ENDLESS, *SPECULATING, *TRAINING, f"drafter.path={tmp_path}")
    live.await_phase(job, "rollout")
    wait_until(lambda: bool(of(DrafterDiverged, live.journal(job))), "it to diverge")
    live.await_phase(job, "rollout", step=live.fold(job).step + 1)
    journal = live.journal(cancelled(live, job))
    diverged = of(DrafterDiverged, journal)
    assert {event.error for event in diverged} == {"5 micro-batches in a row were not finite"}
    assert not of(DrafterMerged, journal)
    line = f"{diverged[0].worker} discards its drafter training: {diverged[0].error}"
    assert line in live.tlt("logs", job).stdout
    assert f"drafter training discarded by {diverged[0].worker}: " in live.tlt("ledger", job).stdout
    assert live.json("ledger", job)["drafter_training"]["divergences"]


def _versions(journal: Sequence[JournalEntry]) -> set[int | None]:
    rollouts = of(RolloutFinished, journal)
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
    always = (*PROPOSING, "speculation.control_share=0")
    again = live.submit(long_spec, *UNEVEN, *always, "algorithm.steps=1", f"drafter.path={folder}")
    assert live.await_end(again)["status"] == "done", live.job(again)
    assert _versions(live.journal(again)) == {0}
