"""Describe the job that a rank has open: its spec, its blobs, and the base fields of its events."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.blobs.answer_files import AnswerFiles
from tlt.blobs.blob_files import Blobs, blobs_of_run
from tlt.errors import ConfigError
from tlt.protocol.commands import OpenJob
from tlt.protocol.rank_messages import RankSetup
from tlt.spec.config import JobSpec


class Reporter(TypedDict):
    """The fields that all of a worker's events have."""

    job: JobId
    worker: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True)
class RankJob:
    """One rank's view of a job."""

    setup: RankSetup
    opened: OpenJob

    @property
    def id(self) -> JobId:
        """Return the job's id."""
        return self.opened.job

    @property
    def spec(self) -> JobSpec:
        """Return the job's spec."""
        return self.opened.spec

    @property
    def device(self) -> torch.device:
        """Return the rank's device."""
        return torch.device(self.setup.device)

    @property
    def engine_cores(self) -> tuple[tuple[int, ...], ...]:
        """Return by rank the cores of this rank's engine; empty ones stand for all."""
        width, rank, cores = self.spec.rollout.tensor_parallel, self.setup.rank, self.setup.cores
        if (complaint := self.spec.rollout.complain_of_ranks(len(cores))) is not None:
            # a job that is resumed may find smaller workers than it began with
            raise ConfigError(complaint)
        return cores[rank : rank + width] or ((),) * width

    @property
    def flight(self) -> Path:
        """Return the job's folder in shared memory."""
        return Path(self.setup.flight) / self.id

    @property
    def member(self) -> str:
        """Return the rank's name among the members that train the drafter."""
        return f"{self.setup.incarnation}.{self.setup.rank}"

    @property
    def reporter(self) -> Reporter:
        """Return the fields that all of this rank's events have."""
        setup = self.setup
        return Reporter(job=self.id, worker=setup.worker, incarnation=setup.incarnation)

    @property
    def answers(self) -> AnswerFiles:
        """Return the job's answers."""
        return AnswerFiles(Path(self.opened.folder))

    def blobs(self, reserved_bytes: Callable[[], int] = lambda: 0) -> Blobs:
        """Return the job's blobs; `reserved_bytes` of shared memory stay free."""
        folder = Path(self.opened.folder)
        return blobs_of_run(folder, self.flight, reserved_bytes=reserved_bytes)
