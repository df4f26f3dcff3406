"""A fit finds what a run's decode steps and updates cost, and forecasts its later steps."""

import gzip
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.properties.test_simulated_jobs import job_of
from tlt.base.id_types import JobId
from tlt.errors import ConfigError
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import RunCommand
from tlt.protocol.events import RunEvent
from tlt.report import Ledger
from tlt.simulation import product_scheduler
from tlt.simulation.comparison import simulate
from tlt.simulation.inputs import EngineCosts, LengthSpec, UpdateCosts
from tlt.simulation.job import Job, Mode, rollout_seconds
from tlt.simulation.run_fit import RunFit
from tlt.spec.config import JobSpec
from tlt.store.journal import JournalEntry

RECORDED = Path(__file__).resolve().parents[2] / "docs" / "recorded"


@pytest.fixture(scope="module")
def recorded() -> RunFit:
    spec = msgspec.json.decode((RECORDED / "spec.json").read_bytes(), type=JobSpec)
    ledger, fit = Ledger(JobId("recorded"), spec), RunFit()
    for line in gzip.decompress((RECORDED / "journal.jsonl.gz").read_bytes()).splitlines():
        entry = msgspec.json.decode(line, type=JournalEntry)
        fit.add(ledger.add(entry.event, entry.at))
    return fit


def test_forecasts_the_second_half_of_a_real_run_from_the_first(recorded: RunFit) -> None:
    steps = recorded.whole_steps()
    known, later = steps[: len(steps) // 2], steps[len(steps) // 2 :]
    job = recorded.job(known)
    # a token's seconds hold for all tokens, of which updates learned from a share
    share = sum(each.learned for each in known) / sum(each.tokens for each in known)
    forecast = sum(
        rollout_seconds(job, each.groups)
        + job.inputs.update.seconds_of(round(each.learned / share), job.workers)
        for each in later
    )
    assert forecast == pytest.approx(sum(each.rollout + each.update for each in later), rel=0.1)


def _fit_of(job: Job, monkeypatch: pytest.MonkeyPatch) -> RunFit:
    """Simulate a job, and fit to the events that its `decide` consumed."""
    events: list[tuple[RunEvent, float]] = []
    decide = product_scheduler.decide

    def record(state: RunState, event: RunEvent, now: float) -> tuple[RunState, list[RunCommand]]:
        events.append((event, now))
        return decide(state, event, now)

    monkeypatch.setattr(product_scheduler, "decide", record)
    simulate(job)
    ledger, fit = Ledger(JobId("simulated"), job.spec), RunFit()
    for event, at in events:
        fit.add(ledger.add(event, at))
    return fit


def test_finds_the_costs_of_a_simulated_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EngineCosts(plain={1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4})
    job = job_of(workers=3, steps=8, prompts=16, slots=8, engine=engine)
    update = UpdateCosts(token=0.05, seconds=30.0)
    inputs = replace(job.inputs, lengths=LengthSpec(median=100.0, sigma=0.6), update=update)
    fit = _fit_of(replace(job, inputs=inputs), monkeypatch)
    found = fit.job(fit.whole_steps()).inputs
    for rows, seconds in found.engine.plain.items():
        assert seconds == pytest.approx(0.8 + 0.2 * rows, rel=0.05), rows
    assert len(found.engine.plain) >= 4
    assert found.update.token == pytest.approx(update.token, rel=0.1)
    assert found.update.seconds == pytest.approx(update.seconds, rel=0.2)
    assert not found.drafts


def test_refuses_a_run_whose_steps_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = _fit_of(replace(job_of(steps=4), mode=Mode(partial=0.5)), monkeypatch)
    with pytest.raises(ConfigError, match=r"it had rollout\.partial"):
        fit.job(fit.whole_steps())


def test_a_run_of_one_step_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = _fit_of(job_of(steps=1), monkeypatch)
    with pytest.raises(ConfigError, match="too few steps"):
        fit.whole_steps()
