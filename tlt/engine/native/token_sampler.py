"""Sample tokens that follow the filtered distribution exactly; log-probs are before the filters.

One `Sampler` serves one running batch, whose requests may all sample differently. Logits are
[rows, window, vocabulary]: a window of consecutive positions in each row.
"""

from collections.abc import Sequence

import torch

from tlt.engine.base import Request, Sampling
from tlt.engine.native.gumbel_noise import GumbelNoise, block, key_word
from tlt.engine.native.keyed_sampling_kernel import SamplingKernel, find_kernel


class Sampler:
    def __init__(self, requests: Sequence[Request], noise: GumbelNoise, like: torch.Tensor) -> None:
        """Prepare for logits with the device and dtype of `like`."""
        settings = [request.sampling for request in requests]
        temperatures = [s.temperature for s in settings]
        greedy = [t == 0 for t in temperatures]
        self._noise = noise
        self._keys = torch.tensor([key_word(r.key) for r in requests], device=like.device)[:, None]
        self._draws = not all(greedy)
        self._greedy = _column(like.new_tensor(greedy, dtype=torch.bool)) if any(greedy) else None
        # a greedy row's log-probs are those of the plain logits
        divisors = [t or 1.0 for t in temperatures]
        self._divisors = (
            None if all(d == 1 for d in divisors) else _column(like.new_tensor(divisors))
        )
        self._filters = Filters(settings, like) if any(filtered(s) for s in settings) else None

    def noise(self, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the noise for positions [rows, window], or None if all rows are greedy."""
        if not self._draws:
            return None
        noise = self._noise.gumbel(self._keys, positions)
        return noise if self._greedy is None else noise.masked_fill_(self._greedy, 0)

    def draw(
        self, logits: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [rows, window] and their log-probs."""
        if (kernel := self._kernel(logits)) is not None:
            return kernel.draw(logits, noise, self._divisors)
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        for rows in _blocks(logits):
            scaled = self._scaled(logits, rows)
            tokens = self._best(scaled, noise, rows)
            selected = scaled.gather(-1, tokens[..., None])[..., 0]
            drawn.append((tokens, selected - scaled.logsumexp(-1)))
        if len(drawn) == 1:
            return drawn[0]
        tokens, logprobs = zip(*drawn, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def sample_drafts(self, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        """Return the tokens [rows, window] that a drafter's logits give with this noise."""
        if (kernel := self._kernel(logits)) is not None:
            return kernel.draw(logits, noise, self._divisors, with_logprobs=False)[0]
        if noise is None:
            return logits.argmax(-1)
        parts = [self._best(self._scaled(logits, rows), noise, rows) for rows in _blocks(logits)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _kernel(self, logits: torch.Tensor) -> SamplingKernel | None:
        return find_kernel(logits) if self._filters is None else None

    def _scaled(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        return logits[rows] if self._divisors is None else logits[rows] / self._divisors[rows]

    def _best(self, scaled: torch.Tensor, noise: torch.Tensor | None, rows: slice) -> torch.Tensor:
        scores = scaled if self._filters is None else self._filters.apply(scaled, rows)
        return (scores if noise is None else scores + noise[rows]).argmax(-1)


def filtered(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


# logits that are sorted first; the whole vocabulary only if they don't suffice
FIRST_SORTED = 1024


class Filters:
    """Top-k, top-p and min-p as one threshold per row, below which no token is sampled.

    Tokens that tie with the last one kept are kept as well.
    """

    def __init__(self, settings: Sequence[Sampling], like: torch.Tensor) -> None:
        top_k = torch.tensor([s.top_k or 2**62 for s in settings], device=like.device)
        # 2 means off, even where rounding lets the cumulated mass exceed 1
        top_p = like.new_tensor([s.top_p if s.top_p < 1 else 2.0 for s in settings])
        self._top_k, self._top_p = _column(top_k), _column(top_p)
        self._min_p = _column(like.new_tensor([s.min_p for s in settings]).log_())
        self._sorts = any(s.top_p < 1 for s in settings)
        # how many of a row's largest logits matter; 0 if only the largest does
        self._largest = max(s.top_k for s in settings)

    def apply(self, scaled: torch.Tensor, rows: slice) -> torch.Tensor:
        """Mask the logits of these rows, which `scaled` holds alone."""
        threshold = (
            self._top_p_threshold(scaled, rows) if self._sorts else self._threshold(scaled, rows)
        )
        return scaled.masked_fill(scaled < threshold, float("-inf"))

    def _threshold(self, scaled: torch.Tensor, rows: slice) -> torch.Tensor:
        """Compute the threshold of top-k and min-p, without sorting the vocabulary."""
        largest = scaled.topk(min(max(self._largest, 1), scaled.shape[-1]), -1).values
        threshold = largest[..., :1] + self._min_p[rows]
        if self._largest == 0:
            return threshold
        top_k = self._top_k[rows]
        last = top_k.clamp(max=largest.shape[-1]).sub(1).expand(-1, scaled.shape[1], -1)
        kth = largest.gather(-1, last).masked_fill(top_k > largest.shape[-1], float("-inf"))
        return torch.maximum(threshold, kth)

    def _top_p_threshold(self, scaled: torch.Tensor, rows: slice) -> torch.Tensor:
        """Compute the threshold with top-p, sorting as few of the logits as suffice."""
        vocabulary = scaled.shape[-1]
        threshold = self._nucleus(scaled, rows, min(FIRST_SORTED, vocabulary))
        if threshold is None:
            threshold = self._nucleus(scaled, rows, vocabulary)
            assert threshold is not None
        return threshold

    def _nucleus(self, scaled: torch.Tensor, rows: slice, width: int) -> torch.Tensor | None:
        """Return the threshold, or None if the `width` largest logits don't determine it."""
        top_k, top_p, min_p = self._top_k[rows], self._top_p[rows], self._min_p[rows]
        whole = width == scaled.shape[-1]
        ordered = scaled.topk(width, -1).values
        last = top_k.clamp(max=width).sub(1).expand(-1, scaled.shape[1], -1)
        threshold = ordered.gather(-1, last).masked_fill(top_k > width, float("-inf"))
        mass = scaled.masked_fill(scaled < threshold, float("-inf")).logsumexp(-1, keepdim=True)
        probabilities = (ordered.masked_fill(ordered < threshold, float("-inf")) - mass).exp_()
        above = probabilities.cumsum(-1).sub_(probabilities)
        inside = above < top_p
        # if all of them are inside, the next one may be, too
        if not whole and bool(
            (inside[..., -1:] & (top_p <= 1) & (probabilities[..., -1:] > 0)).any()
        ):
            return None
        at_edge = ordered.gather(-1, inside.sum(-1, keepdim=True).sub_(1).clamp_(min=0))
        threshold = torch.maximum(threshold, at_edge.masked_fill(top_p > 1, float("-inf")))
        return torch.maximum(threshold, ordered[..., :1] + min_p)


def _blocks(logits: torch.Tensor) -> list[slice]:
    """Split the rows so that intermediate results stay small."""
    rows = max(block(logits.device) // logits[0].numel(), 1)
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]


def _column(values: torch.Tensor) -> torch.Tensor:
    return values[:, None, None]
