"""Every submitted request comes out of `step` exactly once.

Running rows are the first ones of the slots, without gaps: a row that ends is filled from the
queue, in order of priority and arrival, or else by the last row. A prompt's last token is
decoded, not prefilled, so that all first tokens come out of a decode step like the others.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from tlt.engine.base import Capabilities, Completion, Request
from tlt.engine.native.batch import Batch, Row
from tlt.engine.native.network import Network
from tlt.engine.native.noise import Noise
from tlt.engine.native.slots import Slots
from tlt.engine.native.staging import CHUNK, PLACES, Staging
from tlt.engine.native.timeline import Timeline
from tlt.engine.native.weights import Weights
from tlt.engine.requests import check_requests, never_started, queued
from tlt.engine.stopping import completes_stop_string
from tlt.errors import ConfigError
from tlt.messages import BatchSpan, PolicySpan
from tlt.models.decoder import EMBEDDING, Decoder, mismatch
from tlt.types import PolicyVersion, StopReason


class NativeEngine:
    def __init__(
        self,
        model: Decoder,
        decode_text: Callable[[Sequence[int]], str],
        slots: int,
        max_context: int,
        device: torch.device,
        version: PolicyVersion,
        captured: Sequence[int] = (),
    ) -> None:
        """`captured`: at which layers' entrances to keep the states; see `States`."""
        config, dtype = model.config, model.weights[EMBEDDING].dtype
        if max_context > config.max_positions:
            raise ConfigError(
                f"a context of {max_context} tokens exceeds the model's {config.max_positions}"
            )
        if slots < 1:
            raise ConfigError("an engine needs at least one slot")
        if len(set(captured)) < len(captured) or not all(0 <= c <= config.layers for c in captured):
            raise ConfigError(f"no states can be captured at {list(captured)}")
        self._config = config
        self._decode_text = decode_text
        self._count = slots
        self._max_context = max_context
        self._device = device
        self._version = version
        self._weights = Weights(config, dtype, device)
        self._weights.load(model.weights)
        staged = range(slots, slots + min(slots, PLACES))
        self._slots = Slots(config, staged.stop, max_context, captured, dtype, device)
        self._network = Network(
            config,
            self._weights,
            self._slots.cache,
            self._slots.states,
            max_context,
            max(slots, CHUNK),
        )
        self._staging = Staging(self._network, staged)
        self._staging_due = False
        self._noise = Noise(config.vocabulary, device)
        self._queue: deque[Request] = deque()
        self._rows: list[Row | None] = []
        self._batch: Batch | None = None
        self._cancelled: set[int] = set()
        self._ids: set[int] = set()
        # rows that the last step ended: their slots are intact until the next one
        self._ended: dict[int, tuple[int, int]] = {}
        self._step = 0
        self._versions = Timeline[PolicyVersion]()
        self._sizes = Timeline[int]()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_identical=True,
            swap_between_tokens=True,
            hidden_states=True,
            trees=False,
            ngram=False,
        )

    @property
    def slots(self) -> int:
        return self._count

    @property
    def memory(self) -> int:
        return self._slots.bytes + self._network.bytes

    @property
    def running(self) -> int:
        return len(self._ids) - len(self._cancelled)

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them, or none if one is refused."""
        check_requests(requests, self._ids, self._config.vocabulary, self._max_context)
        self._ids.update(request.id for request in requests)
        self._queue = queued(self._queue, requests)
        self._staging_due = True

    def cancel(self, ids: Sequence[int]) -> None:
        self._cancelled |= self._ids.intersection(ids)

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._weights.load(weights)
        self._version = version
        self._staging.forget()
        self._staging_due = True

    def states(self, id: int) -> torch.Tensor:
        if id in self._ended:
            return self._slots.states.of(*self._ended[id])
        for index, row in enumerate(self._rows):
            if row is not None and row.request.id == id:
                return self._slots.states.of(index, row.position(self._step))
        raise KeyError(id)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        self._ended.clear()
        dropped = self._drop_cancelled()
        self._stage()
        self._admit()
        self._close_gaps()
        return dropped + self._decode()

    def close(self) -> None:
        """Nothing of the engine may be used afterwards."""
        vars(self).clear()

    def _drop_cancelled(self) -> list[Completion]:
        if not self._cancelled:
            return []
        ended = [
            self._end(index, "cancelled")
            for index, row in enumerate(self._rows)
            if row is not None and row.request.id in self._cancelled
        ]
        waiting = [r for r in self._queue if r.id in self._cancelled]
        self._queue = deque(r for r in self._queue if r.id not in self._cancelled)
        self._ids.difference_update(request.id for request in waiting)
        ended += [never_started(request) for request in waiting]
        self._cancelled.clear()
        return ended

    def _stage(self) -> None:
        if self._staging_due:
            self._staging_due = self._staging.advance(request.prompt for request in self._queue)

    def _admit(self) -> None:
        gaps = [index for index, row in enumerate(self._rows) if row is None]
        while self._queue and (gaps or len(self._rows) < self._count):
            prompt = self._queue[0].prompt
            staged = self._staging.row_of(prompt)
            if staged is None and len(prompt) > 1:
                return
            if gaps:
                index = gaps.pop(0)
            else:
                index = len(self._rows)
                self._rows.append(None)
            if staged is not None:
                self._slots.copy(staged, index, len(prompt) - 1)
            self._slots.tokens[index, : len(prompt)] = torch.tensor(prompt)
            self._rows[index] = self._row(self._queue.popleft())
            self._batch = None
            self._staging_due = True

    def _row(self, request: Request) -> Row:
        return Row(
            request=request,
            first_step=self._step,
            started=perf_counter(),
            limit=min(len(request.prompt) + request.max_new_tokens, self._max_context) - 1,
        )

    def _close_gaps(self) -> None:
        while None in self._rows:
            last = self._rows.pop()
            if last is None:
                continue
            gap, source = self._rows.index(None), len(self._rows)
            known = last.position(self._step) + 1
            self._slots.copy(source, gap, known)
            self._rows[gap] = last

    def _decode(self) -> list[Completion]:
        if not self._rows:
            return []
        batch = self._batch or self._new_batch()
        self._versions.record(self._step, self._version)
        self._sizes.record(self._step, len(batch.rows))
        logits = self._network.decode(batch.newest, batch.positions, batch.segments)
        tokens, logprobs = batch.sampler.draw(logits, batch.positions + 1)
        ended = batch.advance(tokens)
        places = batch.starts + batch.positions
        self._slots.tokens.view(-1).index_copy_(0, places, tokens)
        self._slots.logprobs.view(-1).index_copy_(0, places, logprobs)
        self._step += 1
        return self._collect(batch, ended)

    def _new_batch(self) -> Batch:
        rows = [row for row in self._rows if row is not None]
        oldest = min(row.first_step for row in rows)
        self._versions.forget(oldest)
        self._sizes.forget(oldest)
        self._batch = Batch(rows, self._step, self._slots.tokens, self._noise, self._slots.logprobs)
        return self._batch

    def _collect(self, batch: Batch, ended: torch.Tensor) -> list[Completion]:
        reasons: dict[int, StopReason] = dict.fromkeys(ended.nonzero()[:, 0].tolist(), "length")
        newest = batch.newest.tolist() if reasons or batch.watched else []
        for index in batch.watched:
            row = batch.rows[index]
            row.tokens.append(newest[index])
            if completes_stop_string(row.tokens, row.request.stop_strings, self._decode_text):
                reasons[index] = "stop"
        for index in reasons:
            if newest[index] in batch.rows[index].request.stop_tokens:
                reasons[index] = "stop"
        for index in reasons:
            row = batch.rows[index]
            self._ended[row.request.id] = index, row.position(self._step)
        return [self._end(index, reason) for index, reason in sorted(reasons.items())]

    def _end(self, index: int, reason: StopReason) -> Completion:
        row = self._rows[index]
        assert row is not None
        self._rows[index] = None
        self._batch = None
        self._ids.remove(row.request.id)
        position = row.position(self._step)
        answer = slice(len(row.request.prompt), position + 1)
        tokens: list[int] = self._slots.tokens[index, answer].tolist()
        logprobs: list[float] = self._slots.logprobs[index, answer].tolist()
        versions = self._versions.spans(row.first_step, self._step)
        sizes = self._sizes.spans(row.first_step, self._step)
        return Completion(
            id=row.request.id,
            tokens=tokens,
            logprobs=logprobs,
            text=self._decode_text(tokens),
            stop=reason,
            policies=tuple(PolicySpan(version=v, tokens=n) for v, n in versions),
            batches=tuple(BatchSpan(size=s, tokens=n) for s, n in sizes),
            decode_seconds=perf_counter() - row.started,
        )
