"""Draws follow the filtered distribution exactly; log-probs are those before the filters.

One `Sampler` serves one running batch, whose requests may all sample differently.
"""

from collections.abc import Sequence

import torch

from tlt.engine.base import Request, Sampling
from tlt.engine.native.noise import Noise, key_word


class Sampler:
    def __init__(self, requests: Sequence[Request], noise: Noise, like: torch.Tensor) -> None:
        """`like` gives device and number format of the logits to come."""
        settings = [request.sampling for request in requests]
        temperatures = [s.temperature for s in settings]
        greedy = [t == 0 for t in temperatures]
        self._noise = noise
        self._keys = torch.tensor([key_word(r.key) for r in requests], device=like.device)
        self._draws = not all(greedy)
        self._greedy = like.new_tensor(greedy, dtype=torch.bool)[:, None] if any(greedy) else None
        # a greedy row's log-probs are those of the plain logits
        divisors = [t or 1.0 for t in temperatures]
        self._divisors = (
            None if all(d == 1 for d in divisors) else like.new_tensor(divisors)[:, None]
        )
        self._filters = Filters(settings, like) if any(filtered(s) for s in settings) else None

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens for these positions, and their log-probs."""
        scaled = logits if self._divisors is None else logits / self._divisors
        scores = scaled if self._filters is None else self._filters.apply(scaled)
        if self._draws:
            noise = self._noise.gumbel(self._keys, positions)
            if self._greedy is not None:
                noise.masked_fill_(self._greedy, 0)
            scores = scores + noise
        tokens = scores.argmax(-1)
        chosen = scaled.gather(1, tokens[:, None])[:, 0]
        return tokens, chosen - scaled.logsumexp(-1)


def filtered(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


class Filters:
    """Top-k, top-p and min-p come down to one threshold a row: what lies below is not drawn.

    Tokens that tie with the last one kept are kept as well.
    """

    def __init__(self, settings: Sequence[Sampling], like: torch.Tensor) -> None:
        # a top-p of 2 is "off" even when rounding lets the cumulated mass exceed 1
        self._top_k = torch.tensor([s.top_k or 2**62 for s in settings], device=like.device)
        self._top_p = like.new_tensor([s.top_p if s.top_p < 1 else 2.0 for s in settings])
        self._min_p = like.new_tensor([s.min_p for s in settings]).log_()

    def apply(self, scaled: torch.Tensor) -> torch.Tensor:
        ordered = scaled.sort(-1, descending=True).values
        last = self._top_k.clamp(max=scaled.shape[-1]).sub_(1)[:, None]
        threshold = ordered.gather(1, last)
        probabilities = ordered.masked_fill(ordered < threshold, float("-inf")).softmax(-1)
        above = probabilities.cumsum(-1).sub_(probabilities)
        last = (above < self._top_p[:, None]).sum(-1, keepdim=True).sub_(1).clamp_(min=0)
        threshold = torch.maximum(threshold, ordered.gather(1, last))
        threshold = torch.maximum(threshold, ordered[:, :1] + self._min_p[:, None])
        return scaled.masked_fill(scaled < threshold, float("-inf"))
