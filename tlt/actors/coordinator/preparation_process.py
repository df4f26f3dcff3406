"""Jobs are prepared in a process of their own: it loads a tokenizer and runs users' code."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from functools import partial
from pathlib import Path

import msgspec
import structlog

from tlt.actors.coordinator.pause_jobs_without_room import RoomWatch
from tlt.actors.coordinator.redis_effects import Effects
from tlt.base.child_process import die_with_parent, last_line
from tlt.base.id_types import JobId
from tlt.protocol.commands import PrepareJob
from tlt.protocol.events import JobPrepared, JobRefused
from tlt.protocol.shared_values import PreparationExit
from tlt.spec.config import JobSpec

_log = structlog.get_logger("coordinator")
SPEC_FILE = "spec.json"
_LONGEST_REPLY = 2**24
# of a job whose process is killed, perhaps because the host lacks memory
_TRIES = 3


class Preparer:
    """Prepare one job at a time in a long-lived `tlt.preparation.prepare_job` process."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.process: Process | None = None
        self._turn = asyncio.Lock()

    async def warm_up(self) -> None:
        """Start the process before the first job, which would wait for it."""
        async with self._turn:
            with contextlib.suppress(OSError):  # the job reports the error if it persists
                await self._running()

    async def prepare(self, job: JobId, spec: JobSpec, folder: Path) -> JobPrepared | JobRefused:
        if (complaint := spec.rollout.complain_of_ranks(self._ranks)) is not None:
            return JobRefused(job=job, error=complaint)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / SPEC_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
        except OSError as error:
            return JobRefused(job=job, error=f"{folder}: cannot be written: {error.strerror}")
        async with self._turn:
            try:
                ended = await self._request(folder)
            except OSError as error:
                return JobRefused(job=job, error=f"nothing can be started: {error.strerror}")
        match ended.result:
            case None:
                error = f"preparing ended with {ended.code}: {ended.last_line}"
                return JobRefused(job=job, error=error)
            case str(error):
                return JobRefused(job=job, error=error)
            case prepared:
                return JobPrepared(job=job, prepared=prepared)

    async def _request(self, folder: Path, tries: int = _TRIES) -> PreparationExit:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(msgspec.json.encode(str(folder)) + b"\n")
        try:
            line = await process.stdout.readline()
            if line:
                return msgspec.json.decode(line, type=PreparationExit)
            last = last_line(await process.stderr.read())
            code = await process.wait()
            if code < 0 and tries > 1:
                _log.warning("preparing again", folder=str(folder), signal=-code)
                return await self._request(folder, tries - 1)
            return PreparationExit(code=code, result=None, last_line=last)
        except (msgspec.DecodeError, ValueError):
            await self.close()  # the rest of its output would be taken for the next job's reply
            code = process.returncode or 0
            return PreparationExit(code=code, result=None, last_line="its reply is unreadable")
        except asyncio.CancelledError:  # a user's module may never finish importing
            await self.close()
            raise

    async def _running(self) -> Process:
        if self.process is None or self.process.returncode is not None:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tlt.preparation.prepare_job"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LONGEST_REPLY,
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        return self.process

    async def close(self) -> None:
        """End the process and the preparation in progress."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


class JobPreparations:
    """Prepare jobs in the background; each outcome becomes an event."""

    def __init__(self, effects: Effects, ranks: int, room: RoomWatch) -> None:
        """Refuse jobs that workers of so many ranks can't decode, and pause those without room."""
        self._effects = effects
        self._room = room
        self._preparer = Preparer(ranks)
        self._tasks: dict[JobId, asyncio.Task[None]] = {}

    async def warm_up(self) -> None:
        await self._preparer.warm_up()

    def begin(self, command: PrepareJob, folder: Path) -> None:
        async def prepare() -> None:
            look = partial(self._room.look_before_start, command.job, command.spec)
            outcome = await look(None)
            if outcome is None:
                outcome = await self._preparer.prepare(command.job, command.spec, folder)
            if isinstance(outcome, JobPrepared):
                outcome = await look(outcome.prepared) or outcome
            await self._effects.post(outcome)

        task = asyncio.create_task(prepare())
        self._tasks[command.job] = task
        task.add_done_callback(lambda _: self._tasks.pop(command.job, None))

    def cancel(self, job: JobId) -> None:
        if job in self._tasks:
            self._tasks[job].cancel()
