"""Collect what a run has injected and found: its claims, its file and its table."""

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.result import Claim
from tests.chaos.checks import Findings


class Injected(msgspec.Struct, frozen=True):
    fault: str
    job: str
    # from the end of the fault until all processes were up and the job's journal had a new event
    seconds: float


class CheckedJob(msgspec.Struct, frozen=True):
    job: str
    status: str
    faults: int
    findings: Findings


class Results(msgspec.Struct):
    injected: list[Injected] = []
    jobs: list[CheckedJob] = []
    # kinds that this machine doesn't allow, or that found nothing to hit, and how often
    skipped: dict[str, int] = {}
    # faults from which a session didn't recover
    not_recovered: list[str] = []
    seconds: float = 0.0

    def add(self, file: Path, run: str) -> None:
        """Add the results of another run, whose jobs may have the same names."""
        read = json.loads(file.read_bytes())
        other = msgspec.convert({**read["details"], "seconds": read["seconds"]}, Results)
        for each in other.injected:
            self.injected.append(msgspec.structs.replace(each, job=f"{run}/{each.job}"))
        for each in other.jobs:
            self.jobs.append(msgspec.structs.replace(each, job=f"{run}/{each.job}"))
        for fault, times in other.skipped.items():
            self.skipped[fault] = self.skipped.get(fault, 0) + times
        self.not_recovered += other.not_recovered
        self.seconds += other.seconds

    def claims(self, rounds: int, jobs: int) -> list[Claim]:
        most = {
            "chaos.answers.lost": sum(job.findings.lost for job in self.jobs),
            "chaos.answers.doubled": sum(job.findings.doubled for job in self.jobs),
            "chaos.faults.not_recovered": len(self.not_recovered),
        }
        return [
            Claim(name="chaos.faults", value=len(self.injected), unit="faults", bar=rounds),
            Claim(name="chaos.jobs", value=len(self.jobs), unit="jobs", bar=jobs),
            *(
                Claim(name=name, value=value, unit=name.split(".")[1], bar=0, less_is_better=True)
                for name, value in most.items()
            ),
        ]

    def details(self, **more: Any) -> dict[str, Any]:
        return {
            "by_fault": self.by_fault(),
            **msgspec.to_builtins(self),
            "answers": sum(job.findings.answers for job in self.jobs),
            "samples": sum(job.findings.samples for job in self.jobs),
            "load": os.getloadavg()[2],
            **more,
        }

    def by_fault(self) -> dict[str, dict[str, float]]:
        """Return what each kind did; lost and doubled are those of the jobs that it hit."""
        found = {job.job: job.findings for job in self.jobs}
        kinds = dict.fromkeys(each.fault for each in self.injected)
        return {kind: self._of_kind(kind, found) for kind in sorted(kinds)}

    def _of_kind(self, kind: str, found: dict[str, Findings]) -> dict[str, float]:
        hits = [each for each in self.injected if each.fault == kind]
        jobs = {each.job for each in hits} & found.keys()
        return {
            "times": len(hits),
            "lost": sum(found[job].lost for job in jobs),
            "doubled": sum(found[job].doubled for job in jobs),
            "median_seconds": round(median(each.seconds for each in hits), 1),
            "worst_seconds": round(max(each.seconds for each in hits), 1),
        }

    def table(self) -> Table:
        table = Table("fault", "times", "lost", "doubled", "median s", "worst s", box=None)
        for fault, figures in self.by_fault().items():
            table.add_row(fault, *(f"{figure:g}" for figure in figures.values()))
        for fault, times in self.skipped.items():
            table.add_row(f"{fault}: nothing to hit", f"{times}x")
        return table
