"""Every submitted request comes out of `step` exactly once.

Running rows are the first ones of the cache, without gaps: a row that ends is filled from the
queue, in order of arrival, or else by the last row. A prompt's last token is decoded, not
prefilled, so that all first tokens come out of a decode step like the others.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch

from tlt.engine.base import Capabilities, Completion, Request
from tlt.engine.native.batch import Batch, Row
from tlt.engine.native.cache import Cache
from tlt.engine.native.network import Network
from tlt.engine.native.noise import Noise
from tlt.engine.native.stopping import completes_stop_string
from tlt.engine.native.timeline import Timeline
from tlt.engine.native.weights import Weights
from tlt.errors import ConfigError
from tlt.messages import BatchSpan, PolicySpan
from tlt.models.llama import EMBEDDING, Llama, mismatch
from tlt.types import PolicyVersion, StopReason

# padded tokens in one prefill; what bounds its memory
_PREFILL_TOKENS = 4096


class NativeEngine:
    def __init__(
        self,
        model: Llama,
        decode_text: Callable[[Sequence[int]], str],
        slots: int,
        max_context: int,
        device: torch.device,
        version: PolicyVersion,
    ) -> None:
        config, dtype = model.config, model.weights[EMBEDDING].dtype
        if max_context > config.max_positions:
            raise ConfigError(
                f"a context of {max_context} tokens exceeds the model's {config.max_positions}"
            )
        self._config = config
        self._decode_text = decode_text
        self._slots = slots
        self._max_context = max_context
        self._device = device
        self._version = version
        self._weights = Weights(config, dtype, device)
        self._weights.load(model.weights)
        self._cache = Cache(config, slots, max_context, dtype, device)
        self._network = Network(config, self._weights, self._cache, max_context)
        self._noise = Noise(config.vocabulary, device)
        self._tokens = torch.zeros(slots, max_context, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(
            slots, max_context, dtype=torch.promote_types(dtype, torch.float32), device=device
        )
        self._queue: deque[Request] = deque()
        self._rows: list[Row | None] = []
        self._batch: Batch | None = None
        self._cancelled: set[int] = set()
        self._ids: set[int] = set()
        self._step = 0
        self._versions = Timeline[PolicyVersion]()
        self._sizes = Timeline[int]()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_identical=True, swap_between_tokens=True, trees=False, ngram=False
        )

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def running(self) -> int:
        return len(self._ids) - len(self._cancelled)

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them, or none if one is refused."""
        ids = [request.id for request in requests]
        if len({*ids} | self._ids) < len(ids) + len(self._ids):
            raise ConfigError("two requests of the same id cannot run at once")
        for request in requests:
            self._check(request)
        self._ids.update(ids)
        self._queue.extend(requests)

    def cancel(self, ids: Sequence[int]) -> None:
        self._cancelled |= self._ids.intersection(ids)

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._weights.load(weights)
        self._version = version

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        dropped = self._drop_cancelled()
        self._admit()
        self._close_gaps()
        return dropped + self._decode()

    def close(self) -> None:
        """Nothing of the engine may be used afterwards."""
        vars(self).clear()

    def _check(self, request: Request) -> None:
        prompt, most = request.prompt, self._max_context - 1
        if not 1 <= len(prompt) <= most:
            raise ConfigError(
                f"request {request.id}: a prompt of {len(prompt)} tokens doesn't fit: "
                f"1 to {most} leave room for an answer"
            )
        if min(prompt) < 0 or max(prompt) >= self._config.vocabulary:
            raise ConfigError(
                f"request {request.id}: the prompt holds a token outside the model's "
                f"vocabulary of {self._config.vocabulary}"
            )
        if request.max_new_tokens < 1:
            raise ConfigError(f"request {request.id}: max_new_tokens must be at least 1")

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
        ended += [self._never_started(request) for request in waiting]
        self._cancelled.clear()
        return ended

    def _admit(self) -> None:
        """Fill free rows; a prompt that a row already holds is copied instead of computed."""
        fresh: list[int] = []
        copies: list[tuple[int, int]] = []
        gaps = [index for index, row in enumerate(self._rows) if row is None]
        while self._queue and (gaps or len(self._rows) < self._slots):
            row = self._row(self._queue.popleft())
            twin = self._twin(row)
            if gaps:
                index = gaps.pop(0)
                self._rows[index] = row
            else:
                index = len(self._rows)
                self._rows.append(row)
            prompt = row.request.prompt
            self._tokens[index, : len(prompt)] = torch.tensor(prompt)
            if twin is None:
                fresh.append(index)
            else:
                copies.append((twin, index))
            self._batch = None
        self._prefill(fresh)
        for twin, index in copies:
            self._cache.copy(twin, index, self._prefix(index))

    def _row(self, request: Request) -> Row:
        return Row(
            request=request,
            first_step=self._step,
            started=perf_counter(),
            prefilled_by=self._version,
            limit=min(len(request.prompt) + request.max_new_tokens, self._max_context) - 1,
        )

    def _twin(self, newcomer: Row) -> int | None:
        for index, row in enumerate(self._rows):
            if (
                row is not None
                and row.prefilled_by == newcomer.prefilled_by
                and row.request.prompt == newcomer.request.prompt
            ):
                return index
        return None

    def _prefix(self, index: int) -> int:
        """How many positions of the prompt belong into the cache before decoding."""
        row = self._rows[index]
        assert row is not None
        return len(row.request.prompt) - 1

    def _prefill(self, fresh: list[int]) -> None:
        """Prompts of similar length together, padded to the longest."""
        waiting = sorted((i for i in fresh if self._prefix(i) > 0), key=self._prefix)
        while waiting:
            longest = self._prefix(waiting[-1])
            together = waiting[-max(1, _PREFILL_TOKENS // longest) :]
            del waiting[-len(together) :]
            rows = torch.tensor(together, device=self._device)
            self._network.prefill(self._tokens.index_select(0, rows)[:, :longest], rows)

    def _close_gaps(self) -> None:
        while None in self._rows:
            last = self._rows.pop()
            if last is None:
                continue
            gap, source = self._rows.index(None), len(self._rows)
            known = last.position(self._step) + 1
            self._cache.copy(source, gap, known - 1)
            self._tokens[gap, :known] = self._tokens[source, :known]
            self._logprobs[gap, :known] = self._logprobs[source, :known]
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
        self._tokens.view(-1).index_copy_(0, places, tokens)
        self._logprobs.view(-1).index_copy_(0, places, logprobs)
        self._step += 1
        return self._collect(batch, ended)

    def _new_batch(self) -> Batch:
        rows = [row for row in self._rows if row is not None]
        oldest = min(row.first_step for row in rows)
        self._versions.forget(oldest)
        self._sizes.forget(oldest)
        self._batch = Batch(rows, self._step, self._tokens, self._noise, self._logprobs)
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
        return [self._end(index, reason) for index, reason in sorted(reasons.items())]

    def _end(self, index: int, reason: StopReason) -> Completion:
        row = self._rows[index]
        assert row is not None
        self._rows[index] = None
        self._batch = None
        self._ids.remove(row.request.id)
        answer = slice(len(row.request.prompt), row.position(self._step) + 1)
        tokens: list[int] = self._tokens[index, answer].tolist()
        logprobs: list[float] = self._logprobs[index, answer].tolist()
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

    def _never_started(self, request: Request) -> Completion:
        self._ids.remove(request.id)
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
