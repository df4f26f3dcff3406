"""Every submitted request comes out of `step` exactly once, with the same tokens however it went.

Running rows are the first ones of the slots, without gaps: a row that ends is filled from the
queue, in order of priority and arrival, or else by the last row. A prompt's last token is
decoded, not prefilled, so that all first tokens come out of a decode step like the others.
A step decodes a window in each row: its newest token, and what was guessed to follow. The keyed
noise selects the policy's token at each place; guesses count as far as they are those tokens.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter

import torch

from tlt.engine.base import Capabilities, Completion, Request
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.policy_forward import PolicyForward, PrefillChunk
from tlt.engine.native.policy_weights import PolicyWeights
from tlt.engine.native.prompt_prefill import CHUNK, PLACES, PromptPrefiller
from tlt.engine.native.running_batch import Row, RunningBatch, StepOutcome
from tlt.engine.native.slot_tensors import SlotTensors
from tlt.engine.native.speculation_controller import SpeculationController, StepTimer, longest_draft
from tlt.engine.native.token_origins import TokenOrigins
from tlt.engine.request_queue import cancelled_before_start, check_requests, order_queue
from tlt.engine.stop_strings import completes_stop_string
from tlt.errors import ConfigError
from tlt.ids import DrafterVersion, PolicyVersion, StopReason
from tlt.models.decoder_spec import EMBEDDING, Decoder, describe_mismatch
from tlt.models.eagle_drafter import Drafter, DrafterConfig, describe_misfit
from tlt.policies.speculation.strategy_policy import StrategyPolicy
from tlt.protocol.records import StrategyTally
from tlt.strategies import Draft, Off, Strategy, max_drafts


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
        arms: Sequence[Strategy] = (),
        ngram_bytes: int = 64 << 20,
    ) -> None:
        """`captured`: at which layers' entrances to keep the states; see `States`.

        `arms`: the ways to decode that room is kept for.
        """
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
        self._captured = captured
        self._decode_text = decode_text
        self._count = slots
        self._max_context = max_context
        self._device = device
        self._version = version
        self._weights = PolicyWeights(config, dtype, device)
        self._weights.load(model.weights)
        self.policy_bytes = sum(tensor.nbytes for tensor in model.weights.values())
        staged = range(slots, slots + min(slots, PLACES))
        ahead = longest_draft(arms)
        # guesses may reach beyond the context: they are not kept there
        positions = max_context + ahead
        self._slots = SlotTensors(config, staged.stop, positions, captured, dtype, device)
        self._network = PolicyForward(
            config,
            self._weights,
            self._slots.cache,
            self._slots.states,
            positions,
            max(slots * (ahead + 1), CHUNK),
            slots * (ahead + 1),
        )
        self._speculation = SpeculationController(
            arms, self._weights, self._slots, slots, ngram_bytes
        )
        self._staging = PromptPrefiller(self._network, staged)
        self._staging_due = False
        self._noise = GumbelNoise(config.vocabulary, device, slots * (ahead + 1))
        self._queue: deque[Request] = deque()
        self._rows: list[Row | None] = []
        self._batch: RunningBatch | None = None
        self._cancelled: set[int] = set()
        self._ids: set[int] = set()
        # rows that the last step ended: their slots are intact until the next one
        self._ended: dict[int, tuple[int, int]] = {}
        self._step = 0
        self._history = TokenOrigins()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            token_identical=True,
            swap_between_tokens=True,
            hidden_states=True,
            trees=False,
            ngram=True,
        )

    @property
    def slots(self) -> int:
        return self._count

    @property
    def memory_bytes(self) -> int:
        """Bytes of all that is kept beside the weights, an adopted drafter and its own included."""
        parts = (self._slots, self._network, self._speculation, self._noise)
        return sum(part.bytes for part in parts)

    def drafter_memory_bytes(self, drafter: DrafterConfig) -> int:
        """Bytes that adopting the first drafter of this kind will add."""
        return self._speculation.bytes_of(drafter)

    @property
    def running(self) -> int:
        return len(self._ids) - len(self._cancelled)

    def submit(self, requests: Sequence[Request]) -> None:
        """All of them, or none if one is refused."""
        check_requests(requests, self._ids, self._config.vocabulary, self._max_context)
        self._ids.update(request.id for request in requests)
        self._queue = order_queue(self._queue, requests)
        self._staging_due = True

    def cancel(self, ids: Sequence[int]) -> None:
        self._cancelled |= self._ids.intersection(ids)

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := describe_mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._weights.load(weights)
        self._version = version
        self._staging.forget()
        self._speculation.handle_weight_swap()
        self._staging_due = True

    def adopt_drafter(self, version: DrafterVersion, drafter: Drafter) -> None:
        """From the next step on, it may be asked."""
        if (complaint := describe_misfit(drafter, self._config)) is not None:
            raise ConfigError(f"drafter version {version} does not fit the policy: {complaint}")
        if missing := set(drafter.config.captured) - set(self._captured):
            raise ConfigError(
                f"drafter version {version} reads the states of layers {sorted(missing)}, "
                "which this engine does not keep"
            )
        running = [row for row in self._rows if row is not None]
        self._speculation.adopt(version, drafter, running)

    def drop_drafter(self) -> None:
        """From the next step on, there is none."""
        self._speculation.forget()

    def set_strategy(self, strategy: Strategy) -> None:
        """From the next step on, always."""
        self._speculation.decode_with(strategy)

    def set_strategy_policy(self, policy: StrategyPolicy, seed: int) -> None:
        """From the next step on, it says which of the arms."""
        self._speculation.let(policy, seed)

    def stop_speculating(self) -> None:
        self.set_strategy(Off())

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self._speculation.overhear(prompt, tokens)

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        return self._speculation.tallies(over=not self.running)

    def hidden_states(self, id: int) -> torch.Tensor:
        if id in self._ended:
            return self._slots.states.of(*self._ended[id])
        for index, row in enumerate(self._rows):
            if row is not None and row.request.id == id:
                return self._slots.states.of(index, row.position(self._step))
        raise KeyError(id)

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def drafter(self) -> DrafterVersion | None:
        return self._speculation.version

    @property
    def token_state_example(self) -> torch.Tensor:
        """What the captured states of one token look like."""
        return self._slots.states.token

    @property
    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The policy's embedding and head: new weights are written into them."""
        return self._weights.embedding, self._weights.head

    def partial_answer(self, id: int) -> list[int] | None:
        """The tokens of an answer that is being written, if it has any yet."""
        for index, row in enumerate(self._rows):
            if row is not None and row.request.id == id:
                answer = slice(len(row.request.prompt), row.position(self._step) + 1)
                return self._slots.tokens[index, answer].tolist()
        return None

    @torch.inference_mode()
    def compute_hidden_states(
        self, tokens: Sequence[int], look: Callable[[], None]
    ) -> torch.Tensor:
        """The states of what somebody wrote, as `states` would give them, while nothing runs.

        Between two chunks `look` may raise.
        """
        assert self.running == 0, "an engine that decodes does not read"
        self._rows.clear()  # they have ended
        read = list(tokens[:-1])
        if len(read) > self._slots.positions:
            raise ConfigError(f"{len(read)} tokens do not fit {self._slots.positions} positions")
        for first in range(0, len(read), CHUNK):
            look()
            self._network.prefill([PrefillChunk(0, first, read[first : first + CHUNK])])
        return self._slots.states.of(0, len(read))

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
        ended += [cancelled_before_start(request) for request in waiting]
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
            self._speculation.moved(last, source, gap)
            self._rows[gap] = last

    def _decode(self) -> list[Completion]:
        if not self._rows:
            return []
        batch = self._batch or self._new_batch()
        round = StepTimer(batch)
        choice = self._speculation.choose(batch)
        noise = batch.noise(max_drafts(choice.strategy) + 1)
        drafts = self._speculation.guess(choice.strategy, batch, noise)
        round.guessed(drafts)
        window = batch.newest[:, None]
        if drafts is not None:
            window = torch.cat([window, drafts], dim=1)
        width = window.shape[1]
        positions = batch.ahead(width)
        logits = self._network.decode(window, positions, partial(batch.segments, width))
        tokens, logprobs = batch.sampler.draw(logits, noise.first(width))
        self._keep(batch.starts[:, None] + (positions + 1), tokens, logprobs)
        drafter = self._speculation.version if isinstance(choice.strategy, Draft) else None
        guessed = drafts is not None
        self._history.record(self._step, self._version, len(batch.rows), guessed, drafter)
        verdict = batch.judge(tokens, drafts)
        self._find_stop_strings(batch, verdict, tokens)
        if guessed:
            for row, kept in zip(batch.rows, verdict.kept, strict=True):
                row.gain(self._step, kept - 1)
        batch.advance(tokens, verdict.kept)
        self._step += 1
        self._speculation.observe(choice, round, batch, verdict)
        return self._collect(batch, verdict)

    def _keep(self, places: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        places = places.view(-1)
        self._slots.tokens.view(-1).index_copy_(0, places, tokens.view(-1))
        self._slots.logprobs.view(-1).index_copy_(0, places, logprobs.view(-1))

    def _find_stop_strings(
        self, batch: RunningBatch, verdict: StepOutcome, tokens: torch.Tensor
    ) -> None:
        for index in batch.watched:
            row = batch.rows[index]
            for count, token in enumerate(tokens[index, : verdict.kept[index]].tolist(), start=1):
                row.tokens.append(token)
                if completes_stop_string(row.tokens, row.request.stop_strings, self._decode_text):
                    verdict.kept[index] = count
                    verdict.reasons[index] = "stop"
                    break

    def _new_batch(self) -> RunningBatch:
        rows = [row for row in self._rows if row is not None]
        oldest = min(row.first_step for row in rows)
        self._history.forget(oldest)
        self._batch = RunningBatch(
            rows, self._step, self._slots.tokens, self._noise, self._slots.logprobs
        )
        return self._batch

    def _collect(self, batch: RunningBatch, verdict: StepOutcome) -> list[Completion]:
        for index in verdict.reasons:
            row = batch.rows[index]
            row.ends_on_draft = verdict.kept[index] <= verdict.accepted[index]
            self._ended[row.request.id] = index, row.position(self._step)
        return [self._end(index, reason) for index, reason in sorted(verdict.reasons.items())]

    def _end(self, index: int, reason: StopReason) -> Completion:
        row = self._rows[index]
        assert row is not None
        self._rows[index] = None
        self._batch = None
        self._ids.remove(row.request.id)
        self._speculation.ended(row, index, self._step)
        position = row.position(self._step)
        answer = slice(len(row.request.prompt), position + 1)
        tokens: list[int] = self._slots.tokens[index, answer].tolist()
        logprobs: list[float] = self._slots.logprobs[index, answer].tolist()
        return Completion(
            id=row.request.id,
            tokens=tokens,
            logprobs=logprobs,
            text=self._decode_text(tokens),
            stop=reason,
            policies=self._history.policies(row, self._step),
            drafters=self._history.drafters(row, self._step),
            origins=self._history.origins(row, self._step),
            batches=self._history.batches(row, self._step),
            decode_seconds=perf_counter() - row.started,
        )
