"""Keep the processes of a job's environments: each answer has one to itself while it is written."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
# most processes and threads of an answer
_PROCESSES = 320
_observations = msgspec.json.Decoder(Observation)
_log = structlog.get_logger("worker")


class EnvironmentEnded(TltError):
    """An environment's process ended by itself, or was killed by somebody else."""


class EnvironmentFailed(TltError):
    """An environment raised an error or took too long."""


class EnvironmentProcess(ABC):
    """Answers the requests of one answer, with a clock that may be stopped."""

    def __init__(self, seconds: float) -> None:
        # for another answer
        self.is_reusable = False
        self._seconds = seconds
        self._deadline: asyncio.Timeout | None = None

    @abstractmethod
    async def call(self, request: AnyRequest | RunAgent) -> Observation:
        """Raise EnvironmentEnded or EnvironmentFailed if it returns nothing that can be used."""

    @abstractmethod
    def kill(self) -> None: ...

    @property
    def has_ended(self) -> bool:
        return False

    @asynccontextmanager
    async def clock(self) -> AsyncGenerator[None]:
        """Raise EnvironmentFailed if what is done takes too long."""
        try:
            async with asyncio.timeout(self._seconds) as self._deadline:
                yield
        except TimeoutError as error:
            raise EnvironmentFailed(f"no answer within {self._seconds:g} s") from error

    def stop_clock(self) -> None:
        """Let the call that is being answered take as long as it wants."""
        if self._deadline is not None:
            self._deadline.reschedule(None)

    def start_clock(self) -> None:
        """Give that call the time of a new one."""
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time() + self._seconds)


class EnvironmentPool:
    def __init__(self, spec: EnvironmentSpec, log: Path) -> None:
        """Write what environments print to the file `log`."""
        self.spec = spec
        self.server = ForkServer(_MODULE, "the environment", _limits_of(spec), spec, log)
        self._idle: list[EnvironmentProcess] = []
        self._used: set[EnvironmentProcess] = set()

    async def start(self) -> None:
        """Load the environment; raise ConfigError if it can't be loaded."""
        await self.server.start()
        for lacking in self.server.started.lacks:
            _log.warning("a limit is missing", environment=self.spec.name, limit=lacking)

    async def begin(self) -> EnvironmentProcess:
        """Return a new process; raise OSError if there is none."""
        return ForkedProcess(await self.server.fork(), self.spec.timeout_seconds)

    async def take(self) -> EnvironmentProcess:
        """Return a process for one answer; raise ConfigError if the environment can't be loaded."""
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if process.has_ended:
                process.kill()
                process = None
        if process is None:
            try:
                process = await self.begin()
            except OSError as error:
                raise EnvironmentEnded(f"no process for an environment: {error}") from error
        self._used.add(process)
        return process

    def put_back(self, process: EnvironmentProcess) -> None:
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
        self.server.stop()


class ForkedProcess(EnvironmentProcess):
    """A process of the answer's own."""

    def __init__(self, child: Child, seconds: float) -> None:
        super().__init__(seconds)
        self.is_reusable = True
        self._child: Child | None = child

    @property
    def has_ended(self) -> bool:
        return self._child is None or self._child.reader.at_eof()

    async def call(self, request: AnyRequest | RunAgent) -> Observation:
        if self._child is None:
            raise EnvironmentEnded("the environment's process was killed")
        # a call that is cut short leaves an answer in the socket
        self.is_reusable = False
        try:
            async with self.clock():
                observation = _observations.decode(await self._child.ask(request))
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
            raise EnvironmentEnded("the environment's process ended") from error
        if observation.error is not None:
            raise EnvironmentFailed(observation.error)
        self.is_reusable = isinstance(request, Judge | RunAgent)
        return observation

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
        # those of all answers, which share one of verifiers
        processes=_PROCESSES * (spec.most_open if spec.kind == "verifiers" else 1),
        refusal="environment.isolation" if required else None,
        remedy="; to run it with the limits that are left, set it to 'available'",
    )
