"""The loggers that a spec may name: TensorBoard, W&B, Trackio and OpenTelemetry.

Each is opened, written to and closed by one thread. A report is stored when `write` returns, as far
as the package can be made to do that.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tlt.report import LoggerReport
from tlt.spec.config import JobSpec

if TYPE_CHECKING:
    from tlt.loggers.otel_spans import SpanSender

_PROJECT = "tlt"


class LoggedRun(msgspec.Struct, frozen=True):
    job: str
    folder: Path
    spec: JobSpec
    # unique to this run: another session may use the same job names
    identity: str

    @property
    def name(self) -> str:
        return f"{self.job}-{self.identity}"


class Logger(Protocol):
    def write(self, report: LoggerReport) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Use TensorBoard's own writer: that of torch does the same and needs torch's memory."""

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.folder / "tensorboard"))

    def write(self, report: LoggerReport) -> None:
        for name, value in report.figures.items():
            self._writer.add_scalar(name, value, report.step, wall_time=report.at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Log the step as a figure: W&B's own steps must grow and count its log calls."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.job,
            id=run.name,
            resume="allow",
            dir=str(run.folder),
            config=msgspec.to_builtins(run.spec),
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, report: LoggerReport) -> None:
        self._run.log({"step": report.step, **report.figures})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, run: LoggedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=run.name,
            resume="allow",
            config=msgspec.to_builtins(run.spec),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def write(self, report: LoggerReport) -> None:
        self._run.log(report.figures, step=report.step)

    def close(self) -> None:
        self._run.finish()


class OpenTelemetry:
    """Send spans instead of figures, those of a step when it is over."""

    def __init__(self, run: LoggedRun) -> None:
        self._job = run.job
        self._sender: SpanSender | None = None

    def write(self, report: LoggerReport) -> None:
        from tlt.loggers.otel_spans import SpanSender

        if self._sender is None:
            self._sender = SpanSender(self._job, report.began)
        self._sender.send(report.spans)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()


_LOGGERS: dict[str, type[TensorBoard | WandB | Trackio | OpenTelemetry]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "opentelemetry": OpenTelemetry,
}


def open_logger(name: str, run: LoggedRun) -> Logger:
    return _LOGGERS[name](run)
