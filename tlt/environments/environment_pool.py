"""Keep the processes of a job's environments: each answer has one to itself while it is written."""

import asyncio
from pathlib import Path

import msgspec
import structlog

from tlt.environments.environment_messages import (
    AnyRequest,
    Judge,
    Observation,
    RunAgent,
)
from tlt.errors import TltError
from tlt.isolation.fork_messages import Limits
from tlt.isolation.fork_server_client import Child, ForkServer
from tlt.spec.environment import EnvironmentSpec

_MODULE = "tlt.environments.environment_fork_server"
_observations = msgspec.json.Decoder(Observation)
_log = structlog.get_logger("worker")


class EnvironmentEnded(TltError):
    """An environment's process ended by itself, or was killed by somebody else."""


class EnvironmentFailed(TltError):
    """An environment raised an error or took too long."""


class EnvironmentPool:
    def __init__(self, spec: EnvironmentSpec, log: Path) -> None:
        """Write what environments print to the file `log`."""
        self._spec = spec
        self._server = ForkServer(_MODULE, "the environment", _limits_of(spec), spec, log)
        self._idle: list[EnvironmentProcess] = []
        self._used: set[EnvironmentProcess] = set()

    async def start(self) -> None:
        """Load the environment; raise ConfigError if it can't be loaded."""
        await self._server.start()
        for lacking in self._server.started.lacks:
            _log.warning("a limit is missing", environment=self._spec.name, limit=lacking)

    async def take(self) -> "EnvironmentProcess":
        """Return a process for one answer; raise ConfigError if the environment can't be loaded."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if process.has_ended:
                process.kill()
                process = None
        if process is None:
            try:
                child = await self._server.fork()
            except OSError as error:
                raise EnvironmentEnded(f"no process for an environment: {error}") from error
            process = EnvironmentProcess(child, self._spec.timeout_seconds)
        self._used.add(process)
        return process

    def put_back(self, process: "EnvironmentProcess") -> None:
        """Use the process for another answer, unless the last one isn't over."""
        self._used.discard(process)
        if process.is_reusable:
            self._idle.append(process)
        else:
            process.kill()

    def discard_idle(self) -> None:
        """End the processes that wait for an answer: they may be ending like another one."""
        for process in self._idle:
            process.kill()
        self._idle.clear()

    def stop(self) -> None:
        """End all processes."""
        for process in (*self._idle, *self._used):
            process.kill()
        self._idle.clear()
        self._used.clear()
        self._server.stop()


class EnvironmentProcess:
    def __init__(self, child: Child, seconds: float) -> None:
        self.is_reusable = True
        self._child: Child | None = child
        self._seconds = seconds
        self._deadline: asyncio.Timeout | None = None

    @property
    def has_ended(self) -> bool:
        return self._child is None or self._child.reader.at_eof()

    async def call(self, request: AnyRequest | RunAgent) -> Observation:
        """Raise EnvironmentEnded or EnvironmentFailed if it returns nothing that can be used."""
        if self._child is None:
            raise EnvironmentEnded("the environment's process was killed")
        # a call that is cut short leaves an answer in the socket
        self.is_reusable = False
        try:
            async with asyncio.timeout(self._seconds) as self._deadline:
                observation = _observations.decode(await self._child.ask(request))
        except TimeoutError as error:
            raise EnvironmentFailed(f"no answer within {self._seconds:g} s") from error
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
            raise EnvironmentEnded("the environment's process ended") from error
        if observation.error is not None:
            raise EnvironmentFailed(observation.error)
        self.is_reusable = isinstance(request, Judge | RunAgent)
        return observation

    def stop_clock(self) -> None:
        """Let the call that is being answered take as long as it wants."""
        if self._deadline is not None:
            self._deadline.reschedule(None)

    def start_clock(self) -> None:
        """Give that call the time of a new one."""
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = None


def _limits_of(spec: EnvironmentSpec) -> Limits:
    required = spec.isolation == "required"
    return Limits(
        network=spec.network,
        memory_gb=spec.memory_gb,
        apart=True,
        writable=spec.writable,
        refusal="environment.isolation" if required else None,
        remedy="; to run it with the limits that are left, set it to 'available'",
    )
