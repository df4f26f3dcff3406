"""The engine protocol over SGLang: its scheduler decodes on its own, `step` collects what ended.

A request's name in SGLang holds its slot in the tap. The slot stays the request's until the step
after the one that returned it, so that its states can be read meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from tlt.base.id_types import DrafterVersion, Member, PolicyVersion, PromptIndex, Step
from tlt.engine.base import Capabilities, Completion, NoiseKey, Request, Sampling
from tlt.engine.request_queue import RequestQueue
from tlt.engine.sglang.client.sglang_client import PartialAnswer, SglangClient
from tlt.engine.sglang.client.tap_reader import TapReader
from tlt.engine.sglang.client.tap_slot_allocator import TapSlotAllocator
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap
from tlt.engine.sglang.shared.speculation_messages import AllowSpeculation, IndexAnswer
from tlt.engine.stop_strings import completes_stop_string
from tlt.errors import ConfigError, RankError
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import count_weight_bytes, load_embedding_and_head
from tlt.models.decoder_spec import EMBEDDING, HEAD, describe_mismatch
from tlt.models.eagle_drafter import Drafter, describe_misfit
from tlt.protocol.shared_values import StrategyTally

# how long `step` waits where nothing ends: the rank handles commands in between
_WAIT_SECONDS = 0.02
_CPU = torch.device("cpu")
# the id of requests that only read a text
_READING = -1


@dataclass(kw_only=True, eq=False)
class _Running:
    request: Request
    name: RequestName
    began: float
    task: asyncio.Task[PartialAnswer]


class SglangEngine:
    def __init__(
        self,
        client: SglangClient,
        model: Path,
        tap: Tap,
        decode_text: Callable[[Sequence[int]], str],
        slots: int,
        max_context: int,
        version: PolicyVersion,
        device: torch.device = _CPU,
    ) -> None:
        """Decode `model` through a client; `tap` has at least as many slots as the engine."""
        config = read_config(model)
        self._client = client
        self._config = config
        self._tap = TapReader(tap)
        self._decode_text = decode_text
        self._count = slots
        self._max_context = max_context
        self._version = version
        self._policy_bytes = count_weight_bytes(model, self._tap.dtype)
        # embedding and head, if a drafter can be trained from what the tap keeps
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._tap.keeps_states:
            self._shared = load_embedding_and_head(model, self._tap.dtype, device)
        self._drafter_version: DrafterVersion | None = None
        self._queue = RequestQueue(config.vocabulary, max_context)
        self._running: dict[int, _Running] = {}
        self._tap_slots = TapSlotAllocator(self._tap.slots)
        # by request that the last step returned: its slot, and positions fed
        self._ended: dict[int, tuple[int, int]] = {}
        # positions that the tap held at the last look
        self._filled = 0
        self._watch = client.watch()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_identical=False,
            shared_noise=False,
            hidden_states=self._tap.keeps_states,
        )

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def policy_bytes(self) -> int:
        return self._policy_bytes

    @property
    def slots(self) -> int:
        return self._count

    @property
    def running(self) -> int:
        return self._queue.running

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.submit(requests)
        self._resume_memory()

    def cancel(self, ids: Sequence[int]) -> None:
        cancelled = self._queue.cancel(ids)
        running = [self._running[id].name for id in cancelled & self._running.keys()]
        self._client.run(self._client.abort(*running))

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := describe_mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._recall_unstarted()
        self._client.run(self._client.update_policy(weights, version))
        self._version = version
        self._watch.note_progress()
        if self._shared is not None:
            embedding, head = self._shared
            embedding.copy_(weights[EMBEDDING])
            if head is not embedding:
                head.copy_(weights[HEAD])

    def step(self) -> list[Completion]:
        self._free_ended()
        self._client.exchange()
        cancelled = self._queue.take_cancelled()
        self._admit()
        if self._running:
            self._client.run(self._wait())
            self._check_progress()
        ended = [running for running in self._running.values() if running.task.done()]
        return cancelled + [self._end(running) for running in ended]

    def release_memory(self) -> None:
        if not self.running:
            self._free_ended()
            self._client.run(self._client.release_memory())

    def _resume_memory(self) -> None:
        if self._client.released:
            self._client.run(self._client.resume_memory())

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._client.send(IndexAnswer(prompt=tuple(prompt), tokens=tuple(tokens)))

    def allow_speculation(self, allowed: bool) -> None:
        self._client.send(AllowSpeculation(allowed=allowed))

    def set_capturing(self, capture: bool) -> None:
        """Do nothing: SGLang's tap always captures."""

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        return self._client.take_tallies()

    def partial_answer(self, id: int) -> list[int] | None:
        if (running := self._running.get(id)) is None or running.request.stop_strings:
            return None
        return self._tap.partial_answer(running.request, running.name)

    def hidden_states(self, id: int) -> torch.Tensor:
        if id in self._ended:
            slot, fed = self._ended[id]
        else:
            name = self._running[id].name
            slot, fed = name.slot, self._tap.fed_positions(name)
        return self._tap.states(slot, fed)

    @property
    def token_state_example(self) -> torch.Tensor:
        return self._tap.token_state_example

    @property
    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._shared is not None, "this engine captures no states"
        return self._shared

    def compute_hidden_states(
        self, tokens: Sequence[int], check_interrupt: Callable[[], None]
    ) -> torch.Tensor:
        """Prefill the tokens by a request that draws one token, which is ignored."""
        assert self.running == 0, "an engine that decodes cannot prefill other texts"
        self._free_ended()
        text = tuple(tokens[:-1])
        if len(text) >= self._max_context:
            raise ConfigError(f"{len(text)} tokens do not fit {self._max_context} positions")
        self._resume_memory()
        name = self._tap_slots.take(text, weights="")
        try:
            task = self._client.start(self._answer(_reading(text), name))
            self._watch.note_progress()
            try:
                while not task.done():
                    self._client.run(_wait_briefly(task))
                    self._check_progress()
                    check_interrupt()
            finally:
                if not task.done():
                    self._client.run(self._client.abort(name))
                    self._client.run(_wait_for_all([task]))
            if self._tap.fed_positions(name) < len(text):
                raise RankError("a text to read left no trace in SGLang's scheduler")
            return self._tap.states(name.slot, len(text)).clone()
        finally:
            self._tap_slots.give_back(name.slot)

    @property
    def drafter_version(self) -> DrafterVersion | None:
        return self._drafter_version

    def adopt_drafter(self, version: DrafterVersion, drafter: Drafter) -> None:
        if (complaint := describe_misfit(drafter, self._config)) is not None:
            raise ConfigError(f"drafter version {version} does not fit the policy: {complaint}")
        self._recall_unstarted()
        self._client.run(self._client.update_drafter(drafter.state_dict(), version))
        self._drafter_version = version
        self._watch.note_progress()

    def drop_drafter(self) -> None:
        self._recall_unstarted()
        self._client.forbid_drafter()
        self._drafter_version = None

    def close(self) -> None:
        self._client.close()

    def _free_ended(self) -> None:
        for slot, _ in self._ended.values():
            self._tap_slots.give_back(slot)
        self._ended.clear()

    def _admit(self) -> None:
        if not self._running:
            self._watch.note_progress()
        while self._queue.waiting and self._tap_slots.any_free:
            request = self._queue.waiting.popleft()
            weights = f"{self._version}.{self._client.drafters}"
            name = self._tap_slots.take(request.prompt, weights)
            self._running[request.id] = _Running(
                request=request,
                name=name,
                began=perf_counter(),
                task=self._client.start(self._answer(request, name)),
            )

    def _recall_unstarted(self) -> None:
        """Take back requests that wait in SGLang: they would share prompts of old weights."""
        waiting = [r for r in self._running.values() if self._tap.fed_positions(r.name) == 0]
        if not waiting:
            return
        self._client.run(self._client.abort(*(running.name for running in waiting)))
        self._client.run(_wait_for_all([running.task for running in waiting]))
        for running in reversed(waiting):
            del self._running[running.request.id]
            self._tap_slots.give_back(running.name.slot)
            self._queue.waiting.appendleft(running.request)

    async def _wait(self) -> None:
        """Wait for any request to end, but briefly; wait for all requests that were cancelled."""
        if cancelled := [self._running[id].task for id in self._queue.cancelled]:
            await _wait_for_all(cancelled)
            return
        tasks = [running.task for running in self._running.values()]
        await asyncio.wait(tasks, timeout=_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, request: Request, name: RequestName) -> PartialAnswer:
        """Generate an answer; SGLang sees no text, so stop strings are searched here."""
        if request.id in self._queue.cancelled:
            return PartialAnswer(tokens=[], logprobs=[], stop="cancelled")
        streamed = bool(request.stop_strings)
        seen = 0
        part: PartialAnswer | None = None
        async for part in self._client.generate(
            request, name, self._max_context - len(request.prompt), streamed
        ):
            while streamed and seen < len(part.tokens):
                seen += 1
                tokens = part.tokens[:seen]
                if completes_stop_string(tokens, request.stop_strings, self._decode_text):
                    await self._client.abort(name)
                    return msgspec.structs.replace(
                        part, tokens=tokens, logprobs=part.logprobs[:seen], stop="stop"
                    )
        if part is None or part.stop is None:
            raise RankError(f"SGLang ended request {request.id} without an answer")
        return part

    def _end(self, running: _Running) -> Completion:
        request, name = running.request, running.name
        part = running.task.result()
        del self._running[request.id]
        if part.stop == "cancelled" and request.id not in self._queue.cancelled:
            raise RankError(f"SGLang gave request {request.id} up: {part.complaint}")
        self._queue.finish(request.id)
        self._ended[request.id] = name.slot, self._tap.fed_at_end(request, name, part)
        return self._tap.completion(
            request,
            name,
            part,
            text=self._decode_text(part.tokens),
            decode_seconds=perf_counter() - running.began,
        )

    def _check_progress(self) -> None:
        before, self._filled = self._filled, self._tap.count_positions()
        if self._filled != before:
            self._watch.note_progress()
        else:
            self._client.check(self._watch)


def _reading(text: tuple[int, ...]) -> Request:
    """Return a request that prefills a text; the token that it draws is ignored."""
    key = NoiseKey(seed=0, step=Step(0), purpose="train", prompt=PromptIndex(0), member=Member(0))
    return Request(
        id=_READING,
        prompt=text,
        key=key,
        sampling=Sampling(temperature=0.0),
        max_new_tokens=1,
        stop_tokens=frozenset(),
    )


async def _wait_briefly(task: asyncio.Task[PartialAnswer]) -> None:
    await asyncio.wait([task], timeout=_WAIT_SECONDS)


async def _wait_for_all(tasks: Sequence[asyncio.Task[PartialAnswer]]) -> None:
    await asyncio.wait(tasks)
