"""Options of TLT's hooks in SGLang's scheduler; an environment variable takes them there.

Every scheduler answers, when it is ready, with what of them is in force in its process.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from tlt.base.strategies import Draft, Strategy, max_drafts
from tlt.engine.sglang.shared.shared_hidden_state_buffer import TapShape

_VARIABLE = "TLT_SGLANG_PLUGIN"
# in what SGLang's scheduler says of itself when it is ready
_ANSWER = "tlt"


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


class HooksInForce(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a scheduler's process; one without our hooks has none."""

    # draft lengths that its worker of ours can verify
    steps: tuple[int, ...] = ()
    # tokens that would end any answer, besides those that its request names
    stop_tokens: tuple[int, ...] = ()

    def add_to(self, said: Mapping[str, Any]) -> dict[str, Any]:
        return {**said, _ANSWER: msgspec.to_builtins(self)}


def complain_of_hooks(said: Mapping[str, Any], steps: tuple[int, ...]) -> str | None:
    """Say what is wrong with the hooks of a scheduler that is to verify these draft lengths.

    `said` is what it said when it became ready.
    """
    if _ANSWER not in said:
        return "TLT's hooks are not in place in its process"
    answer = msgspec.convert(said[_ANSWER], HooksInForce)
    if answer.steps != steps:
        return (
            f"it can verify drafts of {list(answer.steps)} tokens instead of {list(steps)}: "
            "TLT's worker is not in place in its process"
        )
    if answer.stop_tokens:
        return f"the model's stop tokens {list(answer.stop_tokens)} would end answers in it"
    return None


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
