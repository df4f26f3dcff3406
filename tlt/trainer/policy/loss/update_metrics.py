"""Every rank returns the same UpdateMetrics: sums are reduced over the group, then divided."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.protocol.shared_values import UpdateMetrics
from tlt.trainer.collectives import reduce_sum

_SUMS = (
    "loss",
    "entropy",
    "clipped_low",
    "clipped_high",
    "sampling_kl",
    "reference_kl",
    "compared",
    "importance_truncated",
    "weights",
    "tokens",
    "samples",
)
# sums over the tokens whose old log-probs the learner computed, and over the weights of those
# tokens or of their answers
_COMPARED = ("sampling_kl", "compared", "importance_truncated", "weights")

# reported instead of a value that is infinite or not a number
_HUGE = 1e300


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenMetrics:
    """One entry per completion token of a micro-batch, but for importance weights of answers."""

    clipped_low: Tensor
    clipped_high: Tensor
    sampling_kl: Tensor
    reference_kl: Tensor | None
    importance_truncated: Tensor


class MetricSums:
    """Sums stay on the device, so that reading them doesn't stall every micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._norms: list[float] = []
        self._skipped = 0

    def add(
        self, loss: Tensor, entropy: Tensor, metrics: TokenMetrics, samples: int, compared: bool
    ) -> None:
        """Add a micro-batch; `compared` says that its old log-probs are the learner's own."""
        reference_kl = metrics.reference_kl
        sums = (
            loss.detach(),
            entropy.sum(),
            metrics.clipped_low.sum(),
            metrics.clipped_high.sum(),
            metrics.sampling_kl.sum(),
            loss.new_zeros(()) if reference_kl is None else reference_kl.detach().sum(),
            loss.new_tensor(entropy.numel() if compared else 0),
            metrics.importance_truncated.sum(),
            loss.new_tensor(metrics.importance_truncated.numel() if compared else 0),
            loss.new_tensor(entropy.numel()),
            loss.new_tensor(samples),
        )
        self._sums += torch.stack([value.double() for value in sums])

    def add_comparison(self, sampling_kl: Tensor, truncated: Tensor) -> None:
        """Add tokens that were compared with their sampler without being learned from."""
        count = sampling_kl.new_tensor
        tokens, weights = count(sampling_kl.numel()), count(truncated.numel())
        values = (sampling_kl.sum(), tokens, truncated.sum(), weights)
        for name, value in zip(_COMPARED, values, strict=True):
            self._sums[_SUMS.index(name)] += value

    def add_step(self, gradient_norm: float | None) -> None:
        """Add an optimiser step; None for one that was skipped."""
        if gradient_norm is None:
            self._skipped += 1
        else:
            self._norms.append(gradient_norm)

    def metrics(
        self, learning_rate: float, has_reference: bool, epochs: int, group: ProcessGroup | None
    ) -> UpdateMetrics:
        """Return means, and how many samples and tokens were learned from, each counted once."""
        reduce_sum(self._sums, group)
        finite = self._sums.nan_to_num(nan=_HUGE, posinf=_HUGE, neginf=-_HUGE)
        sums = dict(zip(_SUMS, finite.tolist(), strict=True))
        tokens, steps = max(1.0, sums["tokens"]), max(1, len(self._norms))
        minibatches = max(1, len(self._norms) + self._skipped)
        compared = max(1.0, sums["compared"])
        return UpdateMetrics(
            loss=sums["loss"] / minibatches,
            gradient_norm=sum(self._norms) / steps,
            learning_rate=learning_rate if self._norms else 0.0,
            entropy=sums["entropy"] / tokens,
            clipped_low=sums["clipped_low"] / tokens,
            clipped_high=sums["clipped_high"] / tokens,
            sampling_kl=sums["sampling_kl"] / compared,
            reference_kl=sums["reference_kl"] / tokens if has_reference else None,
            importance_truncated=sums["importance_truncated"] / max(1.0, sums["weights"]),
            tokens=round(sums["tokens"] / epochs),
            samples=round(sums["samples"] / epochs),
            optimiser_steps=len(self._norms),
            skipped_steps=self._skipped,
        )
