"""Show a job's progress: a bar on a terminal, plain lines in a pipe."""

from types import TracebackType

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.output import console, say
from tlt.base.human_format import words
from tlt.base.id_types import JobStatus
from tlt.report import Snapshot


class RunProgress:
    def __init__(self, job: str) -> None:
        self._status: JobStatus | None = None
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(job, total=None, detail="")

    def __enter__(self) -> "RunProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_status(self, status: JobStatus) -> None:
        if status == self._status:
            return
        self._status = status
        if self._bar is not None:
            self._bar.update(self._task, detail=status)
        else:
            say(status)

    def say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.console.print(line, markup=False)
        else:
            say(line)

    def show(self, snapshot: Snapshot) -> None:
        if self._bar is None:
            return
        detail = words(snapshot.phase.value)
        if snapshot.expected:
            detail += f" {snapshot.settled}/{snapshot.expected}"
        total, completed = snapshot.steps_planned, int(snapshot.step)
        if total == 0:  # a job that only evaluates
            total, completed = snapshot.expected, snapshot.settled
        self._bar.update(self._task, total=total, completed=completed, detail=detail)
