"""Reports of a recorded run agree with its ledger and are the same each time."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tlt.base.id_types import JobId
from tlt.report import LoggerReport, LoggerReports
from tlt.runs.run_folder_reader import read_snapshot
from tlt.spec.config import JobSpec
from tlt.store.journal import JournalEntry

JOB = JobId("tiny-reasoner-1")


def reported(
    spec: JobSpec, entries: Sequence[JournalEntry], traced: bool = True
) -> list[LoggerReport]:
    reports = LoggerReports(JOB, spec, traced=traced)
    return [report for entry in entries for report in reports.add(entry.event, entry.at)]


def test_reports_every_step_once(
    recorded: Path, spec: JobSpec, entries: Sequence[JournalEntry]
) -> None:
    snapshot = read_snapshot(recorded)
    reports = reported(spec, entries)
    assert [report.number for report in reports] == list(range(len(reports)))
    steps = [report for report in reports if "train/reward" in report.figures]
    evals = [report for report in reports if "eval/reward" in report.figures]
    assert [report.step for report in steps] == [each.step for each in snapshot.steps]
    assert [report.step for report in evals] == [each.step for each in snapshot.evals]
    for report, step, account in zip(steps, snapshot.steps, snapshot.accounts, strict=False):
        figures = report.figures
        assert step.metrics is not None
        assert figures["train/reward"] == step.reward
        assert figures["update/entropy"] == step.metrics.entropy
        assert figures["seconds/step"] == pytest.approx(account.seconds)
        assert sum(v for name, v in figures.items() if name.startswith("duty/")) == pytest.approx(1)
    assert reports[-1].figures["run/seconds"] == pytest.approx(snapshot.seconds)


def test_metrics_of_steps_agree_with_the_sums_of_the_run(
    recorded: Path, spec: JobSpec, entries: Sequence[JournalEntry]
) -> None:
    training = read_snapshot(recorded).drafter_training
    assert training is not None
    steps = [r.figures for r in reported(spec, entries) if "train/reward" in r.figures]
    assert steps[-1]["drafter/micro_batches"] == training.micro_batches
    assert steps[-1]["drafter/accept_length"] == training.evaluations[-1].accept_length
    assert any("drafter/loss" in figures for figures in steps)
    # a step in which nothing was proposed has none
    lengths = [f["accept_length/all"] for f in steps if "accept_length/all" in f]
    assert lengths
    assert all(1 <= length <= 13 for length in lengths)


def test_folding_again_makes_the_same_reports(
    spec: JobSpec, entries: Sequence[JournalEntry]
) -> None:
    assert reported(spec, entries) == reported(spec, entries)
    without = reported(spec, entries, traced=False)
    assert [r.figures for r in without] == [r.figures for r in reported(spec, entries)]
    assert not any(report.spans for report in without)
