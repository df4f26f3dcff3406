"""The engine protocol over SGLang: its scheduler decodes on its own, `step` collects what ended.

A request is known to SGLang under a name that holds its slot in the tap. A slot stays its
request's until the step after the one that returned it, so its states can be read meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import monotonic, perf_counter

import numpy as np
import numpy.typing as npt
import torch

from tlt.engine.base import Capabilities, Completion, Request
from tlt.engine.request_queue import cancelled_before_start, check_requests, order_queue
from tlt.engine.sglang.hidden_state_tap import RequestName, Tap
from tlt.engine.sglang.sglang_client import PartialAnswer, SglangClient
from tlt.engine.sglang.tap_slot_allocator import TapSlotAllocator
from tlt.engine.stop_strings import completes_stop_string
from tlt.errors import ConfigError, RankError
from tlt.ids import PolicyVersion
from tlt.models.decoder_spec import DecoderConfig, describe_mismatch
from tlt.protocol.records import StrategyTally
from tlt.protocol.refs import BatchSpan, DrafterSpan, OriginSpan, PolicySpan

# how long `step` waits where nothing ends: the rank looks for commands in between
_WAIT_SECONDS = 0.02


@dataclass(kw_only=True, eq=False)
class _Running:
    request: Request
    name: RequestName
    began: float
    task: asyncio.Task[PartialAnswer]


class SglangEngine:
    def __init__(
        self,
        server: SglangClient,
        config: DecoderConfig,
        tap: Tap,
        decode_text: Callable[[Sequence[int]], str],
        slots: int,
        max_context: int,
        version: PolicyVersion,
    ) -> None:
        """`tap` has at least as many slots as the engine."""
        self._server = server
        self._config = config
        self._tap = tap
        self._decode_text = decode_text
        self._slots = slots
        self._max_context = max_context
        self._version = version
        self._queue: deque[Request] = deque()
        self._running: dict[int, _Running] = {}
        self._cancelled: set[int] = set()
        self._places = TapSlotAllocator(len(tap.filled))
        # of those that the last step returned: slot, and positions fed
        self._ended: dict[int, tuple[int, int]] = {}
        self._moved = (0, monotonic())

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_identical=False,
            swap_between_tokens=True,
            hidden_states=self._tap.states.shape[2] > 0,
            trees=False,
            ngram=False,
        )

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def running(self) -> int:
        return len(self._queue) + len(self._running) - len(self._cancelled)

    def submit(self, requests: Sequence[Request]) -> None:
        known = {request.id for request in self._queue} | self._running.keys()
        check_requests(requests, known, self._config.vocabulary, self._max_context)
        self._queue = order_queue(self._queue, requests)

    def cancel(self, ids: Sequence[int]) -> None:
        known = {request.id for request in self._queue} | self._running.keys()
        fresh = known.intersection(ids) - self._cancelled
        self._cancelled |= fresh
        running = [self._running[id].name for id in fresh & self._running.keys()]
        self._server.run(self._server.abort(*running))

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := describe_mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._recall_waiting()
        self._server.run(self._server.update_policy(weights, version))
        self._version = version
        self._moved = (-1, monotonic())

    def step(self) -> list[Completion]:
        for slot, _ in self._ended.values():
            self._places.give_back(slot)
        self._ended.clear()
        dropped = [cancelled_before_start(r) for r in self._queue if r.id in self._cancelled]
        self._queue = deque(r for r in self._queue if r.id not in self._cancelled)
        self._cancelled -= {completion.id for completion in dropped}
        self._admit()
        if self._running:
            self._server.run(self._wait())
            self._look_for_stalls()
        ended = [running for running in self._running.values() if running.task.done()]
        return dropped + [self._end(running) for running in ended]

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """It doesn't guess."""

    def stop_speculating(self) -> None:
        """It doesn't guess."""

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        return ()

    def partial_answer(self, id: int) -> list[int] | None:
        """Its tokens come out when they are whole."""
        return None

    def hidden_states(self, id: int) -> torch.Tensor:
        if id in self._ended:
            slot, fed = self._ended[id]
        else:
            name = self._running[id].name
            slot, fed = name.slot, self._fed(name)
        return self._tap.states[slot, :fed]

    def close(self) -> None:
        self._server.close()

    def _admit(self) -> None:
        if not self._running:
            self._moved = (-1, monotonic())
        while self._queue and self._places.any_free:
            request = self._queue.popleft()
            name = self._places.take(request.prompt, f"{self._version}.{self._server.drafters}")
            self._running[request.id] = _Running(
                request=request,
                name=name,
                began=perf_counter(),
                task=self._server.start(self._answer(request, name)),
            )

    def _recall_waiting(self) -> None:
        """Who waits inside SGLang would find the prompt that the old weights cached."""
        waiting = [r for r in self._running.values() if self._fed(r.name) == 0]
        if not waiting:
            return
        self._server.run(self._server.abort(*(running.name for running in waiting)))
        self._server.run(_all([running.task for running in waiting]))
        for running in reversed(waiting):
            del self._running[running.request.id]
            self._places.give_back(running.name.slot)
            self._queue.appendleft(running.request)

    def _fed(self, name: RequestName) -> int:
        """How many of its tokens have been through the policy."""
        ours = int(self._tap.holders[name.slot]) == name.serial
        return int(self._tap.filled[name.slot]) if ours else 0

    async def _wait(self) -> None:
        """A little while, or until all that were cancelled are out."""
        going = [running.task for running in self._running.values()]
        if cancelled := [self._running[id].task for id in self._cancelled]:
            await _all(cancelled)
        else:
            await asyncio.wait(going, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, request: Request, name: RequestName) -> PartialAnswer:
        """SGLang sees no text here, so stop strings are looked for as tokens arrive."""
        if request.id in self._cancelled:
            return PartialAnswer(tokens=[], logprobs=[], stop="cancelled")
        streamed = bool(request.stop_strings)
        seen = 0
        part: PartialAnswer | None = None
        async for part in self._server.generate(
            request, name, self._max_context - len(request.prompt), streamed
        ):
            while streamed and seen < len(part.tokens):
                seen += 1
                if completes_stop_string(
                    part.tokens[:seen], request.stop_strings, self._decode_text
                ):
                    await self._server.abort(name)
                    return PartialAnswer(
                        tokens=part.tokens[:seen], logprobs=part.logprobs[:seen], stop="stop"
                    )
        if part is None or part.stop is None:
            raise RankError(f"SGLang ended request {request.id} without an answer")
        return part

    def _end(self, running: _Running) -> Completion:
        request, name = running.request, running.name
        part = running.task.result()
        del self._running[request.id]
        if part.stop == "cancelled" and request.id not in self._cancelled:
            raise RankError(f"SGLang gave request {request.id} up: {part.complaint}")
        self._cancelled.discard(request.id)
        # the last prompt token drew the first of the answer; the answer's last one drew none
        first = len(request.prompt) - 1
        drawn = slice(first, first + len(part.tokens))
        fed = self._fed(name)
        if part.tokens and fed < drawn.stop:
            raise RankError(f"request {request.id} left no trace in SGLang's scheduler")
        self._ended[request.id] = name.slot, min(drawn.stop, fed)
        return Completion(
            id=request.id,
            tokens=part.tokens,
            logprobs=part.logprobs,
            text=self._decode_text(part.tokens),
            stop=part.stop or "cancelled",
            policies=tuple(
                PolicySpan(version=PolicyVersion(version), tokens=tokens)
                for version, tokens in _spans(self._tap.versions[name.slot], drawn)
            ),
            drafters=(DrafterSpan(version=None, tokens=len(part.tokens)),),
            origins=(OriginSpan(origin="plain", tokens=len(part.tokens)),),
            batches=tuple(
                BatchSpan(size=size, tokens=tokens)
                for size, tokens in _spans(self._tap.sizes[name.slot], drawn)
            ),
            decode_seconds=perf_counter() - running.began,
        )

    def _look_for_stalls(self) -> None:
        filled, now = int(self._tap.filled.sum()), monotonic()
        if filled != self._moved[0]:
            self._moved = filled, now
        elif now - self._moved[1] > self._server.stuck_seconds:
            raise self._server.stuck()


async def _all(tasks: Sequence[asyncio.Task[PartialAnswer]]) -> None:
    await asyncio.wait(tasks)


def _spans(values: npt.NDArray[np.int32], drawn: slice) -> list[tuple[int, int]]:
    return [(value, len(list(same))) for value, same in groupby(values[drawn].tolist())]
