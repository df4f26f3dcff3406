"""State all that decides how much memory a job takes, its reward model included."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from tlt.memory_plan.memory_items import Item
from tlt.memory_plan.model_shapes import DrafterShape, LoraShape, ModelShape

# an estimate, not measured by TLT: of the layer that is computed, the states and their norm, the
# queries, the attention's output; gate, up and their product
_HIDDEN, _INTERMEDIATE = 4, 3


class RewardModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    weights: int
    # bytes of a number
    width: int
    hidden: int
    intermediate: int
    batch_tokens: int
    # processes that hold it
    copies: int = 1

    def items(self, context_bytes: int) -> Iterator[Item]:
        """Yield what its processes hold on a device where each has a context of this size."""
        states = _HIDDEN * self.hidden + _INTERMEDIATE * self.intermediate
        each = self.width * (self.weights + states * self.batch_tokens) + context_bytes
        yield Item(
            name="reward model",
            bytes=self.copies * each,
            note=f"on one device alone, {self.device}: {self.weights / 1e9:.3g} billion weights"
            f" in {self.width} B, and a pass of {self.batch_tokens} tokens",
        )


class JobMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A job's sizes, in the words of its spec."""

    policy: ModelShape
    engine: Literal["native", "sglang"]
    # bytes of a number in the engine
    engine_width: int
    slots: int
    max_context: int
    # tokens of SGLang's cache; None: slots times what each may take
    cache_tokens: int | None = None
    # most tokens that are proposed at once, and all lengths of proposals, 0 included
    drafts: int = 0
    lengths: tuple[int, ...] = (0,)
    # layers whose states are kept
    captured: int = 0
    # the drafter that decodes or is trained, if there is one
    drafter: DrafterShape | None = None
    trains_drafter: bool = False
    drafter_megabytes: int = 0
    microbatch_tokens: int
    gradient_checkpointing: bool
    # the host keeps the inputs of checkpointed layers
    offload: bool = False
    bfloat16: bool
    # an adapter that is trained instead of the weights
    lora: LoraShape | None = None
    # weights that aren't trained
    frozen: int = 0
    # a frozen copy of the first policy, for the penalty towards it
    reference: bool = False
    # those that share a worker's device
    reward_models: tuple[RewardModelMemory, ...] = ()
    # answers of one step
    answers: int = 1
    # tokens of a micro-batch that belong to answers; all of them if unknown
    scored: int | None = None

    @property
    def trained(self) -> int:
        """Return how many numbers the optimiser changes."""
        return self.policy.weights - self.frozen if self.lora is None else self.lora.weights

    @property
    def learner_weights(self) -> int:
        """Return how many numbers the learner's model has."""
        return self.policy.weights + (0 if self.lora is None else self.lora.weights)

    @property
    def can_be_sharded(self) -> bool:
        return self.lora is None and self.frozen == 0

    @property
    def positions(self) -> int:
        """Return the native engine's positions of a row: drafts may reach beyond the context."""
        return self.max_context + self.drafts

    @property
    def request_positions(self) -> int:
        """Return the most tokens of one request in SGLang, which keeps room for two drafts."""
        return self.max_context + (2 * (self.drafts + 1) if self.drafts else 0)

    @property
    def pool_tokens(self) -> int:
        """Return the tokens of SGLang's cache."""
        worst = self.slots * self.request_positions
        return worst if self.cache_tokens is None else min(worst, self.cache_tokens)

    @property
    def update_tokens(self) -> int:
        """Return the most tokens of a micro-batch: a longer answer is one of its own."""
        return max(self.microbatch_tokens, self.max_context - 1)

    @property
    def scored_tokens(self) -> int:
        """Return the most tokens of a micro-batch that meet the vocabulary."""
        return self.update_tokens if self.scored is None else self.scored


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """The division of a job over devices."""

    # ranks of the job, one a device
    ranks: int = 1
    ranks_per_host: int = 1
    # devices over which the learner's parameters, gradients and moments are sharded
    shards: int = 1
    # devices over which an engine's weights and cache are divided
    tensor_parallel: int = 1
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def kernel_numbers(self) -> int:
        """Return how many numbers the sampler computes at once."""
        return 1 << 24 if self.device == "cuda" else 1 << 16
