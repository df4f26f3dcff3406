"""Every rank returns the same UpdateMetrics: sums are reduced over the group, then divided."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.protocol.shared_values import UpdateMetrics
from tlt.trainer.collectives import reduce_sum

# what the device sums up
_SUMS = (
    "loss",
    "entropy",
    "clipped_low",
    "clipped_high",
    "sampling_kl",
    "reference_kl",
    "importance_truncated",
)
# what the host counts: tokens whose old log-probs the learner computed, the weights of those tokens
# or of their answers, and all tokens and samples
_COUNTS = ("compared", "weights", "tokens", "samples")

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
        self._counts = dict.fromkeys(_COUNTS, 0)
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
            metrics.importance_truncated.sum(),
        )
        self._sums += torch.stack([value.double() for value in sums])
        self._counts["tokens"] += entropy.numel()
        self._counts["samples"] += samples
        if compared:
            self._counts["compared"] += entropy.numel()
            self._counts["weights"] += metrics.importance_truncated.numel()

    def add_comparison(self, sampling_kl: Tensor, truncated: Tensor) -> None:
        """Add tokens that were compared with their sampler without being learned from."""
        for name, values in (("sampling_kl", sampling_kl), ("importance_truncated", truncated)):
            self._sums[_SUMS.index(name)] += values.sum()
        self._counts["compared"] += sampling_kl.numel()
        self._counts["weights"] += truncated.numel()

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
        sums = self._over_ranks(group)
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

    def _over_ranks(self, group: ProcessGroup | None) -> dict[str, float]:
        counts = self._sums.new_tensor(list(self._counts.values()))
        sums = torch.cat([self._sums, counts])
        reduce_sum(sums, group)
        finite = sums.nan_to_num(nan=_HUGE, posinf=_HUGE, neginf=-_HUGE)
        return dict(zip((*_SUMS, *_COUNTS), finite.tolist(), strict=True))
