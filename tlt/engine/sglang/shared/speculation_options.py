"""Options of speculation in SGLang, which travel to its scheduler's process."""

import msgspec

from tlt.base.strategies import Draft, Strategy, max_drafts


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: str
    # a folder with the drafter's shape; its weights are used if it is `trained`
    drafter: str
    trained: bool
    # layers that it reads: the first ones of those that the tap keeps
    layers: int
    arms: tuple[Strategy, ...]
    # always decode with this strategy, unless None
    fixed: Strategy | None = None
    # decode with these in turn, each for some steps, unless empty
    script: tuple[tuple[Strategy, int], ...] = ()
    control_share: float = 0.0
    seed: int = 0
    ngram_bytes: int = 64 << 20

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the draft lengths that SGLang must be able to verify, from 0 on."""
        return tuple(sorted({0, *map(max_drafts, self.arms)}))

    def adaptive_config(self) -> bytes:
        """Return the file that makes SGLang build a state for each draft length."""
        return msgspec.json.encode({"1": {"candidate_steps": list(self.steps)}})


def without_noise(strategy: Strategy) -> Strategy:
    """Return the strategy as SGLang proposes: the likeliest tokens, without the policy's noise."""
    return Draft(depth=strategy.depth, noise=False) if isinstance(strategy, Draft) else strategy
