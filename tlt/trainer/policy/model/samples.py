"""A sample is one whole answer; a minibatch's totals count the samples of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySample:
    prompt: Sequence[int]
    completion: Sequence[int]
    # the sampler's, after temperature and before top-p and top-k
    logprobs: Sequence[float]
    temperature: float
    advantage: float
    # all tokens were drawn by the policy that the update starts from
    drawn_by_policy: bool = True

    def __post_init__(self) -> None:
        if len(self.prompt) == 0 or len(self.completion) == 0:
            raise ValueError("a sample needs at least one prompt token and one completion token")
        if len(self.logprobs) != len(self.completion):
            raise ValueError("a sample needs one log-prob for each completion token")
        if self.temperature <= 0:
            raise ValueError("a greedy sample has no log-probs to learn from")

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch:
    """This rank's share of one optimiser step; it may be empty while the totals are not."""

    samples: Sequence[PolicySample]
    # completion tokens and samples over all ranks
    total_tokens: int
    total_sequences: int
