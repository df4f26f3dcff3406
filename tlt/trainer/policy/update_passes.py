"""Forward and backward passes of one policy update, over this rank's micro-batches.

The old log-probs of the first minibatch are those of its own forward pass. Those of later ones are
the sampler's, if the learner agrees with the sampler on all ranks; otherwise the learner computes
them before the first optimiser step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tlt.trainer.collectives import reduce_sum
from tlt.trainer.policy.loss.policy_loss import policy_loss, sampler_mismatch
from tlt.trainer.policy.loss.update_metrics import MetricSums
from tlt.trainer.policy.model.micro_batches import MicroBatch
from tlt.trainer.policy.model.samples import Minibatch, PolicySample
from tlt.trainer.policy.policy_models import PolicyModels

# log-probs of one policy differ by less; ratios that are clipped differ by hundreds of times more
_SAME_POLICY = 1e-3
# one in this many samples of later minibatches is compared with its sampler
_COMPARED_STRIDE = 8


class UpdatePasses:
    def __init__(
        self, models: PolicyModels, group: ProcessGroup | None, between: Callable[[], None]
    ) -> None:
        """`between` is called after every micro-batch and may raise to abandon the update."""
        self.sums = MetricSums(models.device)
        self._models = models
        self._group = group
        self._between = between

    def learn(
        self, minibatch: Minibatch, batches: Sequence[MicroBatch], old: Sequence[Tensor | None]
    ) -> Tensor:
        """Accumulate gradients, and return how many tokens differ from their sampler."""
        differing = torch.zeros((), device=self._models.device)
        for batch, before in zip(batches, old, strict=True):
            current = self._backward(minibatch, batch, before)
            if not batch.is_filler:
                differing += _count_differing(current, batch)
            self._between()
        return differing

    def old_logprobs(
        self, later: Sequence[Minibatch], batches: Sequence[Sequence[MicroBatch]], differing: Tensor
    ) -> list[list[Tensor]]:
        """Return the later minibatches' old log-probs, by minibatch and micro-batch.

        `differing` counts the tokens of the first minibatch that differ from their sampler.
        """
        if self._agrees_with_sampler(later, differing):
            return [[batch.behaviour for batch in share] for share in batches]
        return [[self._logprobs(batch) for batch in share] for share in batches]

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        logprobs = self._models.logprobs(batch)
        self._between()
        return logprobs

    def _agrees_with_sampler(self, later: Sequence[Minibatch], differing: Tensor) -> bool:
        """Return True if no rank finds a differing token, also in some of the later samples.

        Log-probs of another policy's answers are never believed.
        """
        spec = self._models.spec
        if spec.old_logprobs == "learner":
            return False
        strangers = sum(not s.drawn_by_policy for minibatch in later for s in minibatch.samples)
        differing += strangers
        samples: list[PolicySample] = []
        if not differing.item():
            samples = [s for minibatch in later for s in minibatch.samples[::_COMPARED_STRIDE]]
        mismatches: list[tuple[Tensor, Tensor]] = []
        for batch in self._models.micro_batches(samples):
            logprobs = self._logprobs(batch)
            if batch.is_filler:
                continue
            differing += _count_differing(logprobs, batch)
            mismatches.append(sampler_mismatch(spec, logprobs, batch.behaviour))
        reduce_sum(differing, self._group)
        if differing.item():
            return False
        for sampling_kl, truncated in mismatches:
            self.sums.add_comparison(sampling_kl, truncated)
        return True

    def _backward(self, minibatch: Minibatch, batch: MicroBatch, old: Tensor | None) -> Tensor:
        """Run both passes of a micro-batch, and return its present log-probs."""
        models = self._models
        current, entropy = models.score(batch)
        reference = models.score_reference(batch)
        if batch.is_filler:
            # the other ranks wait for this one's part of each layer
            (0.0 * current.sum()).backward()
            return current.detach()
        before = current.detach() if old is None else old
        loss, metrics = policy_loss(
            models.spec, batch, minibatch, current, before, reference, entropy
        )
        loss.backward()
        compared = old is not batch.behaviour
        self.sums.add(loss, entropy.detach(), metrics, batch.samples, compared=compared)
        return current.detach()


def _count_differing(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Count the tokens whose log-probs differ from their sampler's."""
    return (~((logprobs - batch.behaviour).abs() <= _SAME_POLICY)).sum()
