"""Every sample lands in exactly one micro-batch, and its company changes none of its log-probs.

(A model whose rope stretches with the longest row would break that: loading refuses it.)

Packed, samples follow each other in one row. Otherwise each has a row, padded on the right and
without a mask: under causal attention what follows a token cannot change it, and a mask would only
force attention off its fast path.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from tlt.trainer.policy.samples import PolicySample

# Once a micro-batch has this many tokens, a row that would be padding by more than a fifth opens
# the next: padding costs more than a launch.
_SMALL = 1024
_DENSE = 0.8


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """`tokens` is rows x width; what follows `bounds` has one entry per completion token."""

    tokens: Tensor
    # where the samples of a packed row begin, and where the last one ends
    bounds: Tensor | None
    # where in the flattened `tokens` the state lies that predicts this completion token
    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    temperature: Tensor
    advantage: Tensor
    # completion tokens of the sample that this token belongs to
    length: Tensor
    samples: int


def build_micro_batches(
    samples: Sequence[PolicySample], budget: int, device: torch.device, packed: bool
) -> list[MicroBatch]:
    """Longest first, so that a lack of memory shows at once."""
    if packed:
        return [pack(chosen, device) for chosen in _packs(samples, budget)]
    return [pad(bucket, device) for bucket in buckets(samples, budget)]


def _packs(samples: Sequence[PolicySample], budget: int) -> Iterator[Sequence[PolicySample]]:
    chosen: list[PolicySample] = []
    tokens = 0
    for sample in sorted(samples, key=_fed, reverse=True):
        if chosen and tokens + _fed(sample) > budget:
            yield chosen
            chosen, tokens = [], 0
        chosen.append(sample)
        tokens += _fed(sample)
    if chosen:
        yield chosen


def buckets(samples: Sequence[PolicySample], budget: int) -> Iterator[Sequence[PolicySample]]:
    """Samples of similar length, so that little of a rectangle is padding."""
    ordered = sorted(samples, key=_fed, reverse=True)
    start = 0
    while start < len(ordered):
        longest = _fed(ordered[start])
        end = start + 1
        while end < len(ordered) and (end - start + 1) * longest <= budget:
            worth_filling = (end - start) * longest < _SMALL
            if not worth_filling and _fed(ordered[end]) < _DENSE * longest:
                break
            end += 1
        yield ordered[start:end]
        start = end


def _fed(sample: PolicySample) -> int:
    """The last token predicts nothing that we score, so it isn't fed."""
    return sample.length - 1


def pack(chosen: Sequence[PolicySample], device: torch.device) -> MicroBatch:
    ends = list(accumulate((_fed(sample) for sample in chosen), initial=0))
    row = torch.tensor([token for sample in chosen for token in _tokens(sample)])
    return _microbatch(chosen, row[None], ends[:-1], torch.tensor(ends), device)


def pad(bucket: Sequence[PolicySample], device: torch.device) -> MicroBatch:
    width = max(_fed(sample) for sample in bucket)
    rows = torch.zeros(len(bucket), width, dtype=torch.long)
    for row, sample in enumerate(bucket):
        rows[row, : _fed(sample)] = torch.tensor(_tokens(sample))
    return _microbatch(bucket, rows, range(0, rows.numel(), width), None, device)


def _tokens(sample: PolicySample) -> tuple[int, ...]:
    return (*sample.prompt, *sample.completion[:-1])


def _microbatch(
    bucket: Sequence[PolicySample],
    tokens: Tensor,
    starts: Sequence[int],
    bounds: Tensor | None,
    device: torch.device,
) -> MicroBatch:
    firsts = [start + len(s.prompt) - 1 for start, s in zip(starts, bucket, strict=True)]
    positions = [
        torch.arange(first, first + len(sample.completion))
        for first, sample in zip(firsts, bucket, strict=True)
    ]
    lengths = torch.tensor([len(sample.completion) for sample in bucket])

    def flat(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def per_token(values: Iterable[float]) -> Tensor:
        return flat(values).repeat_interleave(lengths).to(device)

    return MicroBatch(
        tokens=tokens.to(device),
        bounds=None if bounds is None else bounds.to(device),
        positions=torch.cat(positions).to(device),
        targets=flat(chain.from_iterable(s.completion for s in bucket), torch.long).to(device),
        behaviour=flat(chain.from_iterable(s.logprobs for s in bucket)).to(device),
        temperature=per_token(sample.temperature for sample in bucket),
        advantage=per_token(sample.advantage for sample in bucket),
        length=lengths.repeat_interleave(lengths).to(device),
        samples=len(bucket),
    )
