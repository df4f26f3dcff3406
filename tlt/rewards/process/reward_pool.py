"""Score answers within a time limit, several at once; user code never makes it raise."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from tlt.errors import ConfigError
from tlt.isolation.fork_messages import Limits
from tlt.isolation.fork_server_client import Child, ForkServer
from tlt.rewards.reward_messages import (
    BatchScores,
    LoadedReward,
    ScoreBatch,
    ScoreRequest,
    ScoreResult,
)
from tlt.spec.reward import SANDBOXED, RewardSpec

_MODULE = "tlt.rewards.process.reward_fork_server"
# a fresh process of a reward model reads its weights first
_LOAD_SECONDS = 900.0
_ENDED = "the reward's process ended"
_scores = msgspec.json.Decoder(BatchScores)
_log = structlog.get_logger("reward")


class _Waiting(NamedTuple):
    request: ScoreRequest
    result: asyncio.Future[ScoreResult]


class RewardPool:
    """One reward, scored by as many processes as there are answers, up to `workers`.

    A process that takes too long is killed; it delays its own answer, or its own batch, alone.
    """

    def __init__(self, spec: RewardSpec, log: Path, workers: int = 8) -> None:
        self.spec = spec
        self._server = ForkServer(_MODULE, "the reward", _limits_of(spec), spec, log)
        self._loaded = LoadedReward()
        self._workers = spec.workers or (1 if spec.kind == "model" else workers)
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []
        self._idle = 0

    async def start(self) -> None:
        """Load the reward; raise ConfigError if it can't be loaded."""
        await self._server.start()
        self._loaded = msgspec.json.decode(self._server.started.about, type=LoadedReward)
        for lacking in self._server.started.lacks:
            _log.warning("a limit is missing", reward=self.spec.label, limit=lacking)

    async def score(
        self,
        completion: str,
        answer: Any,
        row: dict[str, Any],
        known: Mapping[str, Callable[[], Any]] | None = None,
        extract: bool = False,
    ) -> ScoreResult:
        """Return the reward, or the spec's fallback with the reason.

        `known` computes what the reward may want to know of the answer beside its text. `extract`
        asks for what the answer says in the end.
        """
        if not self._slots:
            try:
                await self.start()
            except ConfigError as error:
                return self._failed(str(error))
        wanted = self._loaded.wanted
        request = ScoreRequest(
            completion=completion,
            answer=answer,
            row=row,
            known={name: compute() for name, compute in (known or {}).items() if name in wanted},
            extract=extract,
        )
        waiting = _Waiting(request, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(waiting)
        if self._queue.qsize() > self._idle and len(self._slots) < self._workers:
            self._slots.append(asyncio.create_task(self._serve()))
        result = await waiting.result
        return result if result.error is None else self._failed(result.error)

    async def stop(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()
        self._server.stop()

    def _failed(self, error: str) -> ScoreResult:
        return ScoreResult(reward=self.spec.on_error, error=error)

    async def _serve(self) -> None:
        """Score one list of answers after the other in a process of its own."""
        slot = _Slot(self._server, self.spec)
        try:
            while True:
                batch = await self._next_batch()
                results = await slot.score([each.request for each in batch])
                for waiting, result in zip(batch, results, strict=True):
                    if not waiting.result.done():
                        waiting.result.set_result(result)
        finally:
            slot.kill()

    async def _next_batch(self) -> list[_Waiting]:
        self._idle += 1
        try:
            batch = [await self._queue.get()]
        finally:
            self._idle -= 1
        most = self.spec.batch_size if self._loaded.batched else 1
        while len(batch) < most and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        # whoever gave up waiting is not scored
        return [each for each in batch if not each.result.done()]


class _Slot:
    """A place for a process: a killed one is followed by another."""

    def __init__(self, server: ForkServer, spec: RewardSpec) -> None:
        self._server = server
        self._spec = spec
        self._child: Child | None = None
        self._batches = 0

    async def score(self, requests: list[ScoreRequest]) -> list[ScoreResult]:
        """Return a result for each request.

        A process that ends is followed by another that scores them again: the kernel or a person
        may have killed it. If that one ends too, it is for what it scores.
        """
        if not requests:
            return []
        results = await self._try(requests)
        if results[0].error == _ENDED:
            results = await self._try(requests)
        return results

    async def _try(self, requests: list[ScoreRequest]) -> list[ScoreResult]:
        self._batches += 1
        seconds = self._seconds(len(requests))
        try:
            self._child = self._child or await self._server.fork()
            async with asyncio.timeout(seconds):
                batch = ScoreBatch(number=self._batches, requests=requests)
                scores = _scores.decode(await self._child.ask(batch))
            if scores.number != self._batches:
                raise ConnectionError("the reward's process answers another request")
            results = scores.results
            if len(results) == len(requests):
                return results
            error = f"{len(results)} results for {len(requests)} answers"
        except TimeoutError:
            error = f"no answer within {seconds:g} s"
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            error = _ENDED
        except (ConfigError, UnicodeError) as complaint:
            error = str(complaint)
        self.kill()
        return [ScoreResult(error=error)] * len(requests)

    def _seconds(self, answers: int) -> float:
        if self._spec.kind != "model":
            return self._spec.timeout_seconds
        loading = _LOAD_SECONDS if self._child is None else 0.0
        return self._spec.timeout_seconds * answers + loading

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
        self._child = None


def _limits_of(reward: RewardSpec) -> Limits:
    """Return what a reward may use; what can't be confined doesn't run unless the spec lets it."""
    sandboxed = reward.kind in SANDBOXED
    refusal, remedy = None, ""
    if sandboxed:
        refusal = f"reward.kind {reward.kind} runs in a sandbox only"
    elif reward.kind == "function" and reward.isolation == "required":
        refusal = "reward.isolation"
        remedy = "; to run the function with the limits that are left, set it to 'available'"
    return Limits(
        network=reward.kind == "url" or (reward.network and not sandboxed),
        memory_gb=None if reward.kind == "model" else reward.memory_gb,
        sandboxed=sandboxed,
        writable=reward.writable,
        refusal=refusal,
        remedy=remedy,
    )
