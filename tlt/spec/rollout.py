"""The spec's section about decoding; the comment above a field describes it in docs/spec.md."""

import math
from typing import Literal

import msgspec

from tlt.spec.section import Section, require

DEFAULT_MAX_NEW_TOKENS = 1024


class RolloutSpec(Section, frozen=True, kw_only=True):
    """Set how answers are decoded."""

    # Engine that decodes.
    engine: Literal["native", "sglang"] = "native"
    # Sampling temperature.
    temperature: float = 1.0
    # Sample from the k most likely tokens; 0 for all.
    top_k: int = 0
    # Sample from the most likely tokens that hold this much probability.
    top_p: float = 1.0
    # Leave out tokens below this share of the highest probability.
    min_p: float = 0.0
    # Most tokens of an answer.
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    # Ranks of a worker that hold a part of each weight and decode together; SGLang only.
    tensor_parallel: int = 1
    # Answers that an engine decodes together; `auto` is its even share of a rollout batch, or what
    # its device's memory holds of that.
    slots: Literal["auto"] | int = "auto"
    # Tokens that an engine of SGLang caches of all its answers together; when they are too many, it
    # puts those with the fewest off and reads them again later. `auto` is room for `slots` answers
    # that fill the context, or what memory holds of that.
    cache_tokens: Literal["auto"] | int = "auto"
    # Share a rollout batch evenly; otherwise the first worker takes all it has room for.
    spread: bool = True
    # Groups that a step issues beyond `prompts_per_step`, as a share of it. The step ends with
    # `prompts_per_step` complete groups, and the next one goes on with the other answers under its
    # own weights. 0: it ends with all.
    partial: float = 0.0
    # Groups that a step issues beyond `prompts_per_step`, as a share of it. The step ends with
    # `prompts_per_step` complete groups; the prompts of the others are put off, and answered anew
    # in a step that waits for all of its answers. 0: every step does.
    defer_long: float = 0.0
    # Texts that end an answer.
    stop: list[str] = msgspec.field(default_factory=list)
    # Temperature of evaluations; 0 is greedy.
    eval_temperature: float = 1.0
    # `top_k` of evaluations; 0 for all tokens.
    eval_top_k: int = 0
    # `top_p` of evaluations.
    eval_top_p: float = 1.0
    # `min_p` of evaluations.
    eval_min_p: float = 0.0
    # Attempts at an answer whose worker is lost before it is dropped.
    max_tries: int = 3

    def __post_init__(self) -> None:
        require(self.temperature > 0, "temperature must be above 0")
        require(self.eval_temperature >= 0, "eval_temperature must be 0 (greedy) or more")
        require(self.top_k >= 0, "top_k must be 0 (off) or more")
        require(0 < self.top_p <= 1, "top_p must lie in (0, 1]")
        require(0 <= self.min_p < 1, "min_p must lie in [0, 1)")
        require(self.eval_top_k >= 0, "eval_top_k must be 0 (off) or more")
        require(0 < self.eval_top_p <= 1, "eval_top_p must lie in (0, 1]")
        require(0 <= self.eval_min_p < 1, "eval_min_p must lie in [0, 1)")
        require(self.max_new_tokens >= 1, "max_new_tokens must be at least 1")
        require(self.slots == "auto" or self.slots >= 1, "slots must be at least 1, or auto")
        require(
            self.cache_tokens == "auto" or self.cache_tokens >= 1,
            "cache_tokens must be at least 1, or auto",
        )
        require(
            self.cache_tokens == "auto" or self.engine == "sglang",
            "cache_tokens needs engine: sglang; the native engine caches slots times the context",
        )
        require(self.tensor_parallel >= 1, "tensor_parallel must be at least 1")
        require(
            self.tensor_parallel == 1 or self.engine == "sglang",
            "tensor_parallel needs engine: sglang; the native engine computes on one device",
        )
        require(0 <= self.partial <= 1, "partial must lie in [0, 1]")
        require(0 <= self.defer_long <= 1, "defer_long must lie in [0, 1]")
        require(
            self.partial == 0 or self.defer_long == 0,
            "partial and defer_long are two ways for the same answers: one of them must be 0",
        )
        require(self.max_tries >= 1, "max_tries must be at least 1")

    def complain_of_ranks(self, ranks: int) -> str | None:
        """Say why workers of so many ranks can't form this job's engines; None if they can."""
        width = self.tensor_parallel
        if ranks % width == 0:
            return None
        return (
            f"rollout.tensor_parallel: {width} needs workers of {width} ranks or a multiple, and "
            f"there are {ranks}; `tlt up --ranks {width}` starts such ones"
        )

    def complain_of_staleness(self, staleness: int) -> str | None:
        """Say why steps can't end early where the next one's answers begin before; or None."""
        key = "partial" if self.partial else "defer_long"
        if not staleness or not (self.partial or self.defer_long):
            return None
        return f"rollout.{key} and algorithm.staleness cure the same wait: one of them must be 0"

    def engine_ranks(self, ranks: int) -> range:
        """Return the ranks that have an engine, of a worker with so many."""
        return range(0, ranks, self.tensor_parallel)

    @property
    def chosen_slots(self) -> int:
        """Return the number of slots, in a spec in which it is chosen."""
        assert self.slots != "auto", "a rank chooses them when it opens the job"
        return self.slots

    @property
    def most_cached(self) -> int | None:
        """Return the tokens that SGLang caches; None for all that its slots may need."""
        return None if self.cache_tokens == "auto" else self.cache_tokens

    def surplus(self, groups: int) -> int:
        """Return how many groups a step issues beyond those that it needs."""
        return math.ceil(max(self.partial, self.defer_long) * groups)

    @property
    def filtered(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
