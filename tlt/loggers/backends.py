"""The loggers that a spec may name: what is written to each, and how.

Each is made, written to and closed by one thread. What was written is there when `write` returns,
as far as the package can be told so.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tlt.config import JobSpec
from tlt.report import Report

if TYPE_CHECKING:
    from tlt.loggers.otel_spans import Tracing

_PROJECT = "tlt"


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """Of which run."""

    job: str
    folder: Path
    spec: JobSpec
    # of this run alone: a session may number its jobs as another one did
    identity: str

    @property
    def name(self) -> str:
        return f"{self.job}-{self.identity}"


class Logger(Protocol):
    def write(self, report: Report) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """By its own writer: torch's does the same, and takes torch's memory."""

    def __init__(self, destination: Destination) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(destination.folder / "tensorboard"))

    def write(self, report: Report) -> None:
        for name, value in report.figures.items():
            self._writer.add_scalar(name, value, report.step, wall_time=report.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Its own steps may only grow, and count what was logged: ours is a figure among the others."""

    def __init__(self, destination: Destination) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=destination.job,
            id=destination.name,
            resume="allow",
            dir=str(destination.folder),
            config=msgspec.to_builtins(destination.spec),
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, report: Report) -> None:
        self._run.log({"step": report.step, **report.figures})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, destination: Destination) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=destination.name,
            resume="allow",
            config=msgspec.to_builtins(destination.spec),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, report: Report) -> None:
        self._run.log(report.figures, step=report.step)

    def close(self) -> None:
        self._run.finish()


class OpenTelemetry:
    """Spans, not figures; those of a step are sent when it is over."""

    def __init__(self, destination: Destination) -> None:
        self._job = destination.job
        self._tracing: Tracing | None = None

    def write(self, report: Report) -> None:
        from tlt.loggers.otel_spans import Tracing

        if self._tracing is None:
            self._tracing = Tracing(self._job, report.began)
        self._tracing.send(report.spans)

    def close(self) -> None:
        if self._tracing is not None:
            self._tracing.close()


def open_logger(name: str, destination: Destination) -> Logger:
    match name:
        case "tensorboard":
            return TensorBoard(destination)
        case "wandb":
            return WandB(destination)
        case "trackio":
            return Trackio(destination)
        case "opentelemetry":
            return OpenTelemetry(destination)
        case _:
            raise AssertionError(f"no logger {name}")
