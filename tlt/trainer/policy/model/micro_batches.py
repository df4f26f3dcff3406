"""Every sample is in exactly one micro-batch, and its neighbours change none of its log-probs.

(A model whose rope stretches with the longest row would break that: loading refuses it.)

Packed samples follow each other in one row. Otherwise each has a row of its own, padded on the
right and without a mask: under causal attention a later token can't change an earlier one, and a
mask would force attention off its fast path.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicySample:
    prompt: Sequence[int]
    # all tokens after it; those between the policy's turns are an environment's
    completion: Sequence[int]
    # of the policy's tokens, by the sampler, after temperature and before top-p and top-k
    logprobs: Sequence[float]
    temperature: float
    advantage: float
    reward: float = 0.0
    # answers of one group are compared with each other
    group: int = 0
    # all tokens were drawn by the policy that the update starts from
    drawn_by_policy: bool = True
    # first and end of each of the policy's turns in the completion; None: it is one turn
    turns: Sequence[tuple[int, int]] | None = None
    # the policy's tokens of the answer whose part this is; None: it is the whole
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) == 0 or self.learned_tokens == 0:
            raise ValueError("a sample needs at least one prompt token and one completion token")
        if len(self.logprobs) != self.learned_tokens:
            raise ValueError("a sample needs one log-prob for each token of the policy")
        if self.temperature <= 0:
            raise ValueError("a greedy sample has no log-probs to learn from")

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.completion)

    @property
    def policy_turns(self) -> Sequence[tuple[int, int]]:
        return ((0, len(self.completion)),) if self.turns is None else self.turns

    @property
    def learned_tokens(self) -> int:
        """Count the tokens that the policy has drawn: the others have no loss."""
        return sum(end - first for first, end in self.policy_turns)


@dataclass(frozen=True, kw_only=True, eq=False)
class Minibatch:
    """This rank's share of one optimiser step; it may be empty while the totals are not."""

    samples: Sequence[PolicySample]
    # the policy's tokens and samples over all ranks
    total_tokens: int
    total_sequences: int


# From this many tokens on, a row that would be padded by more than a fifth opens the next
# micro-batch, because padding then costs more than a launch.
_SMALL = 1024
_DENSE = 0.8


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """`tokens` are rows x width.

    From `positions` to `owner` there is one entry per token of the policy, after it one per answer.
    """

    tokens: Tensor
    # where each sample of a packed row begins, and where the last one ends
    bounds: Tensor | None
    # input tokens of the longest sample
    longest: int
    # index in the flattened `tokens` of the state that predicts the policy's token
    positions: Tensor
    targets: Tensor
    # the sampler's log-probs
    behaviour: Tensor
    temperature: Tensor
    advantage: Tensor
    # the policy's tokens in the token's sample, and its index in the micro-batch
    length: Tensor
    owner: Tensor
    # the policy's tokens in the answer that the token's sample is a part of
    answer_length: Tensor
    rewards: Tensor
    groups: Tensor
    samples: int

    @property
    def is_filler(self) -> bool:
        """Return True if nothing is learned from it."""
        return self.samples == 0

    def sum_by_answer(self, values: Tensor) -> Tensor:
        """Return each answer's sum of a value of its tokens."""
        return values.new_zeros(self.samples).index_add(0, self.owner, values)


def build_micro_batches(
    samples: Sequence[PolicySample], budget: int, device: torch.device, packed: bool
) -> list[MicroBatch]:
    """Build micro-batches of at most `budget` tokens, longest first to run out of memory early."""
    if packed:
        return [pack(batch, device) for batch in _group_by_budget(samples, budget)]
    return [pad(batch, device) for batch in group_by_length(samples, budget)]


def _group_by_budget(
    samples: Sequence[PolicySample], budget: int
) -> Iterator[Sequence[PolicySample]]:
    batch: list[PolicySample] = []
    tokens = 0
    for sample in sorted(samples, key=_input_length, reverse=True):
        if batch and tokens + _input_length(sample) > budget:
            yield batch
            batch, tokens = [], 0
        batch.append(sample)
        tokens += _input_length(sample)
    if batch:
        yield batch


def group_by_length(
    samples: Sequence[PolicySample], budget: int
) -> Iterator[Sequence[PolicySample]]:
    """Group samples of similar length, so that little of a padded rectangle is padding."""
    ordered = sorted(samples, key=_input_length, reverse=True)
    start = 0
    while start < len(ordered):
        longest = _input_length(ordered[start])
        end = start + 1
        while end < len(ordered) and (end - start + 1) * longest <= budget:
            worth_filling = (end - start) * longest < _SMALL
            if not worth_filling and _input_length(ordered[end]) < _DENSE * longest:
                break
            end += 1
        yield ordered[start:end]
        start = end


def _input_length(sample: PolicySample) -> int:
    """Count the input tokens: all but the last, which predicts nothing that is scored."""
    return sample.length - 1


def pack(samples: Sequence[PolicySample], device: torch.device) -> MicroBatch:
    ends = list(accumulate((_input_length(sample) for sample in samples), initial=0))
    row = torch.tensor([token for sample in samples for token in _input_tokens(sample)])
    return _build(samples, row[None], ends[:-1], torch.tensor(ends), device)


def pad(samples: Sequence[PolicySample], device: torch.device) -> MicroBatch:
    width = max(_input_length(sample) for sample in samples)
    rows = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        rows[row, : _input_length(sample)] = torch.tensor(_input_tokens(sample))
    return _build(samples, rows, range(0, rows.numel(), width), None, device)


def _input_tokens(sample: PolicySample) -> tuple[int, ...]:
    return (*sample.prompt, *sample.completion[:-1])


def make_filler(device: torch.device) -> MicroBatch:
    """Return a micro-batch of one token for a rank that has fewer samples than others."""
    sample = PolicySample(
        prompt=(0,), completion=(0,), logprobs=(0.0,), temperature=1.0, advantage=0.0
    )
    return replace(pad([sample], device), samples=0)


def _build(
    samples: Sequence[PolicySample],
    tokens: Tensor,
    starts: Sequence[int],
    bounds: Tensor | None,
    device: torch.device,
) -> MicroBatch:
    firsts = [start + len(s.prompt) - 1 for start, s in zip(starts, samples, strict=True)]
    positions = [
        torch.arange(first + begin, first + end)
        for first, sample in zip(firsts, samples, strict=True)
        for begin, end in sample.policy_turns
    ]
    targets = [s.completion[begin:end] for s in samples for begin, end in s.policy_turns]
    lengths = torch.tensor([sample.learned_tokens for sample in samples])

    def flat(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def per_token(values: Iterable[float]) -> Tensor:
        return flat(values).repeat_interleave(lengths).to(device)

    return MicroBatch(
        tokens=tokens.to(device),
        bounds=None if bounds is None else bounds.to(device),
        longest=max(map(_input_length, samples)),
        positions=torch.cat(positions).to(device),
        targets=flat(chain.from_iterable(targets), torch.long).to(device),
        behaviour=flat(chain.from_iterable(s.logprobs for s in samples)).to(device),
        temperature=per_token(sample.temperature for sample in samples),
        advantage=per_token(sample.advantage for sample in samples),
        length=lengths.repeat_interleave(lengths).to(device),
        owner=torch.arange(len(samples)).repeat_interleave(lengths).to(device),
        answer_length=torch.tensor([s.answer_tokens or s.learned_tokens for s in samples])
        .repeat_interleave(lengths)
        .to(device),
        rewards=flat((sample.reward for sample in samples), torch.float64).to(device),
        groups=flat((sample.group for sample in samples), torch.long).to(device),
        samples=len(samples),
    )
