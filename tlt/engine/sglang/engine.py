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
from tlt.engine.requests import check_requests
from tlt.engine.sglang.places import Places
from tlt.engine.sglang.server import Part, Server
from tlt.engine.sglang.tap import Tap, request_name
from tlt.engine.stopping import completes_stop_string
from tlt.errors import ConfigError, RankError
from tlt.messages import BatchSpan, PolicySpan
from tlt.models.decoder import DecoderConfig, mismatch
from tlt.types import PolicyVersion

# how long `step` waits where nothing ends: the rank looks for commands in between
_WAIT_SECONDS = 0.02


@dataclass(kw_only=True, eq=False)
class _Running:
    request: Request
    slot: int
    name: str
    began: float
    task: asyncio.Task[Part]


class SglangEngine:
    def __init__(
        self,
        server: Server,
        config: DecoderConfig,
        tap: Tap,
        decode_text: Callable[[Sequence[int]], str],
        slots: int,
        max_context: int,
        version: PolicyVersion,
        stuck_seconds: float,
    ) -> None:
        """`tap` has at least as many slots as the engine.

        Requests that run for `stuck_seconds` without a token hang, and raise.
        """
        self._stuck_seconds = stuck_seconds
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
        self._places = Places(len(tap.filled))
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
        waiting = [*self._queue, *requests]
        self._queue = deque(sorted(waiting, key=lambda request: -request.priority))

    def cancel(self, ids: Sequence[int]) -> None:
        known = {request.id for request in self._queue} | self._running.keys()
        for id in known.intersection(ids) - self._cancelled:
            self._cancelled.add(id)
            if id in self._running:
                self._server.abort(self._running[id].name)

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._server.run(self._server.update_policy(weights, version))
        self._version = version

    def step(self) -> list[Completion]:
        for slot, _ in self._ended.values():
            self._places.give_back(slot)
        self._ended.clear()
        dropped = [self._never_started(r) for r in self._queue if r.id in self._cancelled]
        self._queue = deque(r for r in self._queue if r.id not in self._cancelled)
        self._cancelled -= {completion.id for completion in dropped}
        self._admit()
        if dropped or not self._running:
            return dropped
        self._server.run(self._wait())
        self._look_for_stalls()
        return [
            self._end(running) for running in list(self._running.values()) if running.task.done()
        ]

    def states(self, id: int) -> torch.Tensor:
        slot, fed = self._ended.get(id, (None, 0))
        if slot is None:
            slot = self._running[id].slot
            fed = int(self._tap.filled[slot])
        return self._tap.states[slot, :fed]

    def close(self) -> None:
        self._server.close()

    def _admit(self) -> None:
        while self._queue and self._places.any_free:
            request = self._queue.popleft()
            place = self._places.take(request.prompt, f"{self._version}.{self._server.drafters}")
            name = request_name(place.slot, place.salt, request.id)
            self._running[request.id] = _Running(
                request=request,
                slot=place.slot,
                name=name,
                began=perf_counter(),
                task=self._server.start(self._answer(request, name, place.salt)),
            )

    async def _wait(self) -> None:
        """A little while, or until all that were cancelled are out."""
        going = [running.task for running in self._running.values()]
        if cancelled := [self._running[id].task for id in self._cancelled]:
            await asyncio.wait(cancelled)
        else:
            await asyncio.wait(going, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, request: Request, name: str, salt: str) -> Part:
        """SGLang sees no text here, so stop strings are looked for as tokens arrive."""
        streamed = bool(request.stop_strings)
        seen = 0
        part: Part | None = None
        async for part in self._server.generate(
            request, name, salt, self._max_context - len(request.prompt), streamed
        ):
            while streamed and seen < len(part.tokens):
                seen += 1
                if completes_stop_string(
                    part.tokens[:seen], request.stop_strings, self._decode_text
                ):
                    self._server.abort(name)
                    return Part(
                        tokens=part.tokens[:seen], logprobs=part.logprobs[:seen], stop="stop"
                    )
        if part is None or part.stop is None:
            raise RankError(f"SGLang ended request {name} without an answer")
        return part

    def _end(self, running: _Running) -> Completion:
        request = running.request
        del self._running[request.id]
        self._cancelled.discard(request.id)
        part = running.task.result()
        # the last prompt token drew the first of the answer; the answer's last one drew none
        first = len(request.prompt) - 1
        drawn = slice(first, first + len(part.tokens))
        self._ended[request.id] = running.slot, min(drawn.stop, int(self._tap.filled[running.slot]))
        return Completion(
            id=request.id,
            tokens=part.tokens,
            logprobs=part.logprobs,
            text=self._decode_text(part.tokens),
            stop=part.stop or "cancelled",
            policies=tuple(
                PolicySpan(version=PolicyVersion(version), tokens=tokens)
                for version, tokens in _spans(self._tap.versions[running.slot], drawn)
            ),
            batches=tuple(
                BatchSpan(size=size, tokens=tokens)
                for size, tokens in _spans(self._tap.sizes[running.slot], drawn)
            ),
            decode_seconds=perf_counter() - running.began,
        )

    def _never_started(self, request: Request) -> Completion:
        return Completion(
            id=request.id,
            tokens=[],
            logprobs=[],
            text="",
            stop="cancelled",
            policies=(),
            batches=(),
            decode_seconds=0.0,
        )

    def _look_for_stalls(self) -> None:
        filled, now = int(self._tap.filled.sum()), monotonic()
        if filled != self._moved[0] or not self._running:
            self._moved = filled, now
        elif now - self._moved[1] > self._stuck_seconds:
            said = self._server.last_lines()
            raise RankError(f"SGLang decoded nothing for {self._stuck_seconds:.0f} s: {said}")


def _spans(values: npt.NDArray[np.int32], drawn: slice) -> list[tuple[int, int]]:
    return [(value, len(list(same))) for value, same in groupby(values[drawn].tolist())]
