"""Run a worker's answers as tasks of verifiers, in a process that all of them share."""

import asyncio
import json
from pathlib import Path

import msgspec

from tlt.base.child_process import last_line
from tlt.environments.environment_messages import (
    AnyRequest,
    Observation,
    RunAgent,
    Serve,
    Serving,
)
from tlt.environments.environment_pool import (
    EnvironmentEnded,
    EnvironmentFailed,
    EnvironmentPool,
    EnvironmentProcess,
)
from tlt.environments.reward_value import reward_of
from tlt.errors import ConfigError
from tlt.isolation.fork_server_client import Child
from tlt.spec.environment import EnvironmentSpec

_MOST_BYTES = 1 << 30
# its imports take seconds, and servers of the taskset may start, too
_START_SECONDS = 300.0
_Link = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_serving = msgspec.json.Decoder(Serving)


class _Outcome(msgspec.Struct, frozen=True):
    error: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = {}


_outcomes = msgspec.json.Decoder(_Outcome)


def open_pool(spec: EnvironmentSpec, log: Path) -> EnvironmentPool:
    """Return the processes of a job's environments; what they print goes to the file `log`."""
    return (VerifiersPool if spec.kind == "verifiers" else EnvironmentPool)(spec, log)


class VerifiersPool(EnvironmentPool):
    def __init__(self, spec: EnvironmentSpec, log: Path) -> None:
        super().__init__(spec, log)
        self._log = log
        self._host: Child | None = None
        self._socket = ""
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Load the taskset; raise ConfigError if it can't be loaded."""
        await super().start()
        try:
            # there is no endpoint yet
            _, writer = await self.connect("", "")
            writer.close()
        except OSError as error:
            raise ConfigError(f"environment.taskset: {error}") from error

    async def begin(self) -> EnvironmentProcess:
        return _TaskRun(self)

    async def connect(self, endpoint: str, key: str) -> _Link:
        """Connect to the program that runs tasks, and start it if need be; raise OSError."""
        async with self._lock:
            if self._host is not None:
                try:
                    return await self._connect()
                except (ConnectionRefusedError, FileNotFoundError):
                    self._end_host()
            self._host = await self.server.fork()
            try:
                async with asyncio.timeout(_START_SECONDS):
                    answer = await self._host.ask(Serve(endpoint=endpoint, key=key))
            except TimeoutError as error:
                self._end_host()
                complaint = f"verifiers isn't loaded within {_START_SECONDS:g} s"
                raise ConfigError(f"environment.taskset: {complaint}") from error
            except asyncio.IncompleteReadError as error:
                self._end_host()
                raise ConnectionError("the process of verifiers ended") from error
            serving = _serving.decode(answer)
            if serving.error is not None:
                self._end_host()
                if serving.has_ended:
                    raise ConnectionError(self._last_words())
                raise ConfigError(f"environment.taskset: {serving.error}")
            self._socket = serving.socket
            return await self._connect()

    def stop(self) -> None:
        self._end_host()
        super().stop()

    async def _connect(self) -> _Link:
        return await asyncio.open_unix_connection(self._socket, limit=_MOST_BYTES)

    def _last_words(self) -> str:
        return f"{self.spec.python} ended: {last_line(self._log.read_bytes())}"

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.kill()
        self._host = None


class _TaskRun(EnvironmentProcess):
    def __init__(self, pool: VerifiersPool) -> None:
        super().__init__(pool.spec.timeout_seconds)
        self._pool = pool
        self._writer: asyncio.StreamWriter | None = None

    async def call(self, request: AnyRequest | RunAgent) -> Observation:
        assert isinstance(request, RunAgent)
        asked = {"task": request.row["task"], "model": request.token}
        try:
            reader, self._writer = await self._pool.connect(request.socket, request.shared_key)
            async with self.clock():
                self._writer.write(json.dumps(asked).encode() + b"\n")
                said = await reader.readline()
        except OSError as error:
            raise EnvironmentEnded(f"the process of verifiers ended: {error}") from error
        if not said:
            causes = "somebody killed it, or it ran out of memory (environment.memory_gb)"
            raise EnvironmentEnded(f"the process of verifiers ended: {causes}")
        outcome = _outcomes.decode(said)
        if outcome.error is not None:
            raise EnvironmentFailed(outcome.error)
        found = reward_of(outcome.reward) if request.counts else Observation()
        if found.error is not None:
            raise EnvironmentFailed(found.error)
        return msgspec.structs.replace(found, metrics=outcome.metrics)

    def kill(self) -> None:
        """Give the task up, if it isn't over."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
