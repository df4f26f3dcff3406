"""Options of TLT's hooks in SGLang's scheduler; an environment variable takes them there."""

import os

import msgspec

from tlt.base.strategies import Draft, Strategy, max_drafts
from tlt.engine.sglang.shared.shared_hidden_state_buffer import TapShape

_VARIABLE = "TLT_SGLANG_PLUGIN"


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: str
    # a folder with the drafter's shape; its weights are used if it is `trained`
    drafter: str
    trained: bool
    # True if it proposes some tokens only, by rows of the policy's head
    hot: bool = False
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


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    tap: str
    shape: TapShape
    device: str
    # a file to which every proposal of the drafter is written, for tests and benchmarks
    proposals: str | None = None
    speculation: SpeculationOptions | None = None
    # descriptor of the socket between the first scheduler and the rank
    socket: int | None = None

    def environment(self) -> dict[str, str]:
        """Return the variable that a scheduler's process needs."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}


def options_of_process() -> SchedulerOptions | None:
    """Return the options with which this process was started, if any."""
    text = os.environ.get(_VARIABLE)
    return None if text is None else msgspec.json.decode(text, type=SchedulerOptions)


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file of proposals."""

    name: str
    # tokens that the policy has processed
    seen: int
    # the token that it sampled then, and the drafter's proposal after it
    tokens: list[int]


def without_noise(strategy: Strategy) -> Strategy:
    """Return the strategy as SGLang proposes: the likeliest tokens, without the policy's noise."""
    return Draft(depth=strategy.depth, noise=False) if isinstance(strategy, Draft) else strategy
