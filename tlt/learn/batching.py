"""Every sample lands in exactly one micro-batch, and padding changes no completion's log-prob.

Rows are padded on the right and get no attention mask: under causal attention what follows a token
cannot change it, and a mask would only force attention off its fast path.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from tlt.learn.sample import LearnSample

# Once a micro-batch has this many tokens, a row that would be padding by more than a fifth opens
# the next: padding costs more than a launch.
_SMALL = 1024
_DENSE = 0.8


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """`tokens` is rows x longest; everything else has one entry per completion token."""

    tokens: Tensor
    # where in the flattened `tokens` the state lies that predicts this completion token
    positions: Tensor
    targets: Tensor
    behaviour: Tensor
    temperature: Tensor
    advantage: Tensor
    # completion tokens of the sample that this token belongs to
    length: Tensor
    samples: int


def microbatches(
    samples: Sequence[LearnSample], budget: int, device: torch.device
) -> list[Microbatch]:
    """Buckets of similar length, longest first so that a lack of memory shows at once."""
    return [_pad(bucket, device) for bucket in _buckets(samples, budget)]


def _buckets(samples: Sequence[LearnSample], budget: int) -> Iterator[Sequence[LearnSample]]:
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


def _fed(sample: LearnSample) -> int:
    """The last token predicts nothing that we score, so it isn't fed."""
    return sample.length - 1


def _pad(bucket: Sequence[LearnSample], device: torch.device) -> Microbatch:
    width = max(_fed(sample) for sample in bucket)
    tokens = torch.zeros(len(bucket), width, dtype=torch.long)
    positions: list[Tensor] = []
    for row, sample in enumerate(bucket):
        fed = (*sample.prompt, *sample.completion[:-1])
        tokens[row, : len(fed)] = torch.tensor(fed)
        first = row * width + len(sample.prompt) - 1
        positions.append(torch.arange(first, first + len(sample.completion)))
    lengths = torch.tensor([len(sample.completion) for sample in bucket])

    def flat(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def per_token(values: Iterable[float]) -> Tensor:
        return flat(values).repeat_interleave(lengths).to(device)

    return Microbatch(
        tokens=tokens.to(device),
        positions=torch.cat(positions).to(device),
        targets=flat(chain.from_iterable(s.completion for s in bucket), torch.long).to(device),
        behaviour=flat(chain.from_iterable(s.logprobs for s in bucket)).to(device),
        temperature=per_token(sample.temperature for sample in bucket),
        advantage=per_token(sample.advantage for sample in bucket),
        length=lengths.repeat_interleave(lengths).to(device),
        samples=len(bucket),
    )
