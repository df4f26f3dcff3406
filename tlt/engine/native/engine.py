"""The engine that needs nothing but torch.

Every submitted request is returned by `step` exactly once. Its tokens follow the policy's
distribution; on a CPU in float32 they depend on nothing but the request and the policy's weights.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Strategy, max_drafts
from tlt.engine.base import Capabilities, Completion, Request
from tlt.engine.native.decode_loop import DecodeLoop
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.policy_forward import PolicyForward, PolicyWeights, PrefillChunk
from tlt.engine.native.prompt_prefill import CHUNK, PromptPrefiller, prefill_rows
from tlt.engine.native.row_slot_table import RowTable
from tlt.engine.native.slot_storage import SlotTensors
from tlt.engine.native.speculation_controller import SpeculationController
from tlt.engine.request_queue import RequestQueue
from tlt.errors import ConfigError
from tlt.models.decoder_spec import EMBEDDING, Decoder, describe_mismatch
from tlt.models.eagle_drafter import Drafter
from tlt.protocol.shared_values import StrategyTally


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
        """Keep hidden states at the entrances of the `captured` layers, and room for these `arms`.

        `CapturedStates` says what a captured layer is; `arms` are the strategies to decode with.
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
        self._count = slots
        self._version = version
        self._weights = PolicyWeights(config, dtype, device)
        self._weights.load(model.weights)
        self._policy_bytes = sum(tensor.nbytes for tensor in model.weights.values())
        held_rows = prefill_rows(slots)
        drafts = max(map(max_drafts, arms), default=0)
        # drafts may reach beyond the context; they are not kept there
        positions, most_decoded = max_context + drafts, slots * (drafts + 1)
        self._slots = SlotTensors(config, held_rows.stop, positions, captured, dtype, device)
        most_tokens = max(most_decoded, CHUNK)
        self._forward = PolicyForward(self._weights, self._slots, most_tokens, most_decoded)
        self.speculation = SpeculationController(
            arms, self._weights, self._slots, slots, ngram_bytes
        )
        self._prefill_due = False
        # True while the memory of the slots is freed
        self._released = False
        self._noise = GumbelNoise(config.vocabulary, device, most_decoded)
        self._queue = RequestQueue(config.vocabulary, max_context)
        self._rows = RowTable(slots, max_context, self._slots)
        self._prefiller = PromptPrefiller(self._forward, held_rows, self._slots, self._rows.kept)
        # beginnings of keeping hidden states that were seen
        self._beginnings = self._slots.states.beginnings
        self._loop = DecodeLoop(
            self._rows, self._slots, self._forward, self._noise, self.speculation, decode_text
        )

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            # other formats and devices sum in an order that depends on the batch's shape, which
            # may turn a tie
            token_identical=self._weights.is_exact,
            shared_noise=True,
            hidden_states=True,
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
    def memory_bytes(self) -> int:
        """Count all memory but the weights; that of an adopted drafter is included."""
        parts = (self._slots, self._forward, self.speculation, self._noise)
        return sum(part.bytes for part in parts)

    @property
    def token_state_example(self) -> torch.Tensor:
        return self._slots.states.token

    @property
    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weights.embedding, self._weights.head

    @property
    def running(self) -> int:
        return self._queue.running

    def submit(self, requests: Sequence[Request]) -> None:
        self._queue.submit(requests)
        self._restore_memory()
        self._prefill_due = True

    def cancel(self, ids: Sequence[int]) -> None:
        self._queue.cancel(ids)

    def swap_weights(self, version: PolicyVersion, weights: Mapping[str, torch.Tensor]) -> None:
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if (complaint := describe_mismatch(self._config, shapes)) is not None:
            raise ConfigError(f"policy version {version} does not fit the engine: {complaint}")
        self._weights.load(weights)
        self._version = version
        self._forget_prefixes()
        self.speculation.handle_weight_swap()

    def release_memory(self) -> None:
        # the next step returns requests that were cancelled
        if self._released or self.running or self._queue.cancelled:
            return
        self._rows.clear()
        self._rows.ended.clear()
        self._prefiller.clear()
        self._slots.release()
        self.speculation.release_memory()
        self._released = True

    def _forget_prefixes(self) -> None:
        """Read prompts anew: what is cached of them has other weights, or no hidden states."""
        self._prefiller.clear()
        self._rows.kept.restart(self._rows.step)
        self._prefill_due = True

    def _restore_memory(self) -> None:
        if self._released:
            self._slots.restore()
            self.speculation.restore_memory()
            self._released = False

    def index_answer(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        self.speculation.index_answer(prompt, tokens)

    def allow_speculation(self, allowed: bool) -> None:
        self.speculation.allow(allowed)

    def set_capturing(self, capture: bool) -> None:
        self.speculation.set_capturing(capture)

    def take_strategy_tallies(self) -> tuple[StrategyTally, ...]:
        return self.speculation.take_tallies(idle=not self.running)

    def partial_answer(self, id: int) -> list[int] | None:
        if (running := self._rows.find(id)) is None:
            return None
        index, row = running
        answer = slice(len(row.request.prompt), row.position(self._rows.step) + 1)
        return self._slots.tokens[index, answer].tolist()

    def hidden_states(self, id: int) -> torch.Tensor:
        return self._slots.states.of(*self._rows.locate_states(id))

    @torch.inference_mode()
    def compute_hidden_states(
        self, tokens: Sequence[int], check_interrupt: Callable[[], None]
    ) -> torch.Tensor:
        """Check for interrupts between chunks."""
        assert self.running == 0, "an engine that decodes cannot prefill other texts"
        self._rows.clear()
        self._restore_memory()
        fed = list(tokens[:-1])
        if len(fed) > self._slots.positions:
            raise ConfigError(f"{len(fed)} tokens do not fit {self._slots.positions} positions")
        self._slots.states.enable(True)
        try:
            for first in range(0, len(fed), CHUNK):
                check_interrupt()
                self._forward.prefill([PrefillChunk(0, first, fed[first : first + CHUNK])])
        finally:
            self.speculation.update_capturing()
        return self._slots.states.of(0, len(fed))

    @property
    def drafter_version(self) -> DrafterVersion | None:
        return self.speculation.drafter_version

    def adopt_drafter(self, version: DrafterVersion, drafter: Drafter) -> None:
        self.speculation.adopt_drafter(version, drafter)

    def drop_drafter(self) -> None:
        self.speculation.drop_drafter()

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        self._rows.ended.clear()
        cancelled = self._loop.end_cancelled(self._queue)
        if self._slots.states.beginnings != self._beginnings:
            self._beginnings = self._slots.states.beginnings
            self._forget_prefixes()
        if self._prefill_due:
            self._prefill_due = self._prefiller.advance(r.prompt for r in self._queue.waiting)
        if self._rows.admit(self._queue.waiting, self._prefiller):
            self._prefill_due = True
        for row, source, target in self._rows.close_gaps():
            self.speculation.handle_row_move(row, source, target)
        ended = self._loop.decode(self._version)
        for completion in ended:
            self._queue.finish(completion.id)
        return cancelled + ended

    def close(self) -> None:
        vars(self).clear()
