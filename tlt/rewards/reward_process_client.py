"""Score answers in a separate process within a time limit; reward code never makes it raise."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tlt.child_process import die_with_parent
from tlt.config import RewardSpec
from tlt.errors import ConfigError
from tlt.rewards.reward_process_main import LENGTH, ScoreRequest, ScoreResult

_START_SECONDS = 60.0
_decoder = msgspec.json.Decoder(ScoreResult)


class RewardSandbox:
    """Score answers in a process that ends with the thread that starts it: a long-lived one."""

    def __init__(self, spec: RewardSpec, log: Path) -> None:
        self._spec = spec
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._wanted = frozenset[str]()

    async def score(
        self,
        completion: str,
        answer: Any,
        row: dict[str, Any],
        known: Mapping[str, Callable[[], Any]] | None = None,
    ) -> ScoreResult:
        """Return the reward, or the configured fallback with the reason.

        `known` computes what the verifier may want to know of the answer beside its text.
        """
        try:
            if self._process is None:
                await self.start()
            result = await self._request(
                ScoreRequest(
                    completion=completion,
                    answer=answer,
                    row=row,
                    known={
                        name: compute()
                        for name, compute in (known or {}).items()
                        if name in self._wanted
                    },
                ),
                self._spec.timeout_seconds,
            )
        except TimeoutError:
            self.stop()
            error = f"no answer within {self._spec.timeout_seconds:g} s"
            return ScoreResult(reward=self._spec.on_error, error=error)
        except (asyncio.IncompleteReadError, ConnectionError, ConfigError) as error:
            self.stop()
            complaint = "the reward's process ended"
            if isinstance(error, ConfigError):
                complaint = str(error)
            return ScoreResult(reward=self._spec.on_error, error=complaint)
        except asyncio.CancelledError:
            self.stop()  # its result would be taken for that of the next request
            raise
        if result.error is not None:
            return msgspec.structs.replace(result, reward=self._spec.on_error)
        return result

    async def start(self) -> None:
        """Start the process; raise ConfigError if the verifier cannot be loaded."""
        ours, theirs = socket.socketpair()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tlt.rewards.reward_process_main", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                preexec_fn=die_with_parent(signal.SIGKILL),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        try:
            first = await self._request(self._spec, _START_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            self.stop()
            raise ConfigError(f"the reward's process did not start, see {self._log}") from error
        if first.fatal:
            self.stop()
            raise ConfigError(first.error or "the reward cannot be had")
        self._wanted = first.wanted

    def stop(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(
                    self._process.pid, signal.SIGKILL
                )  # with all that the user's code started
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
        self._process = self._reader = self._writer = None

    async def _request(self, message: ScoreRequest | RewardSpec, seconds: float) -> ScoreResult:
        assert self._reader is not None
        assert self._writer is not None
        body = msgspec.json.encode(message)
        self._writer.write(LENGTH.pack(len(body)) + body)
        async with asyncio.timeout(seconds):
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return _decoder.decode(await self._reader.readexactly(length))
