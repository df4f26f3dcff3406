"""A drafter learns from its policy, one micro-batch a call; between two calls it may stop for good.

What is used is a running mean of the weights: good whenever the training stops, so that its length
need not be known. An update whose loss or gradient isn't finite changes nothing but a counter, and
one that a look gives up changes nothing at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.interrupt import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels, load_kernels
from tlt.models.eagle_drafter import Drafter, new_drafter
from tlt.trainer.drafter.delta_merging import DrafterSnapshot
from tlt.trainer.drafter.distillation_loss import distance
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.interruptible_matmul import watched
from tlt.trainer.drafter.micro_batches import DrafterBatch
from tlt.trainer.drafter.muon import MuonWithAdam
from tlt.trainer.drafter.samples import EmbeddingAndHead
from tlt.trainer.drafter.unrolled_chains import unroll
from tlt.trainer.policy.adamw import copy_named, require_same_shapes
from tlt.trainer.policy.fused_layers import fuse


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    """What one micro-batch showed."""

    rows: int
    # cross-entropy a guess, in nats
    loss: float
    # by step: how much of the policy's distribution the drafter's covers
    overlap: tuple[float, ...]
    skipped: bool


class DrafterLearner:
    def __init__(
        self,
        drafter: Drafter,
        ends: EmbeddingAndHead,
        hyperparameters: DrafterHyperparameters,
        sizes: Tensor,
    ) -> None:
        """Takes the drafter over; `ends` are of the same device and precision.

        `sizes` are its `input_sizes`.
        """
        self.hyperparameters = hyperparameters
        self.ends = ends
        # behind the weights, whoever made them
        self.updates = 0
        self.skipped = 0
        self._drafter = drafter
        self._parameters = dict(drafter.named_parameters())
        self._mean = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._optimiser = MuonWithAdam(self._parameters, {"fc.weight": sizes})
        self._kernels = _kernels(ends.head)
        if self._kernels is not None:
            fuse(drafter, self._kernels)

    def learn(
        self, batch: DrafterBatch, check: CheckInterrupt = never_interrupt
    ) -> MicroBatchResult:
        """`look` is called often, and gives the micro-batch up by raising."""
        with watched(self._drafter, batch.rows, check):
            loss, overlap = self._loss(batch, check)
            slopes = torch.autograd.grad(loss, list(self._parameters.values()))
        gradients = dict(zip(self._parameters, slopes, strict=True))
        size = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        value = loss.item()
        skipped = not (math.isfinite(value) and math.isfinite(size.item()))
        if skipped:
            self.skipped += 1
        else:
            rates = self.hyperparameters.rates(self.updates, self._optimiser.steps)
            self._optimiser.step(gradients, *rates, check)
            self.updates += 1
            self._average()
        return MicroBatchResult(
            rows=batch.rows, loss=value, overlap=tuple(overlap), skipped=skipped
        )

    def drafter(self) -> Drafter:
        """A copy, of the running mean."""
        with torch.no_grad():
            found = new_drafter(self._drafter.config).to(self.ends.head)
            found.load_state_dict({**self._drafter.state_dict(), **self._mean})
        return found.requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        """All that another learner needs to go on with the next micro-batch; live tensors."""
        return {
            **self._weights(),
            **{f"optimiser.{name}": tensor for name, tensor in self._optimiser.state().items()},
            "updates": torch.tensor(self.updates),
            "skipped": torch.tensor(self.skipped),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "mean": {}, "optimiser": {}}
        for name, tensor in state.items():
            part, _, rest = name.partition(".")
            if rest:
                parts[part][rest] = tensor
        copy_named(self._parameters, parts["weights"], "drafter")
        copy_named(self._mean, parts["mean"], "drafter's mean")
        self._optimiser.load(parts["optimiser"])
        self.updates = int(state["updates"])
        self.skipped = int(state["skipped"])

    def snapshot(self, check: CheckInterrupt = never_interrupt) -> DrafterSnapshot:
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._weights().items():
            check()
            tensors[name] = tensor.clone()
        return DrafterSnapshot(tensors=tensors, updates=self.updates)

    @torch.no_grad()
    def rebase(self, since: DrafterSnapshot, onto: DrafterSnapshot) -> None:
        """What was learned since then is put onto something else; the moments stay."""
        weights = self._weights()
        require_same_shapes(weights, since.tensors, "drafter's mark")
        require_same_shapes(weights, onto.tensors, "drafter's trunk")
        for name, tensor in weights.items():
            tensor.sub_(since.tensors[name]).add_(onto.tensors[name])
        self.updates += onto.updates - since.updates

    def _weights(self) -> dict[str, Tensor]:
        return {
            **{f"weights.{name}": p.detach() for name, p in self._parameters.items()},
            **{f"mean.{name}": tensor for name, tensor in self._mean.items()},
        }

    def _loss(self, batch: DrafterBatch, check: CheckInterrupt) -> tuple[Tensor, list[float]]:
        """A mean over the guesses that can be measured, later steps weighing less."""
        total, weight = self.ends.head.new_zeros(()), 0.0
        overlaps: list[Tensor] = []
        readouts = unroll(self._drafter, batch, self.ends.embedding, self._kernels, check)
        for step, readout in enumerate(readouts):
            live = batch.live[step].nonzero()[:, 0]
            last = batch.states[batch.aims[step][live], -1]
            found = distance(self._drafter, readout[live], last, self.ends.head, check)
            share = self.hyperparameters.fading**step
            total = total + share * found.loss
            weight += share * len(live)
            overlaps.append(found.overlap / max(1, len(live)))
        return total / max(1.0, weight), torch.stack(overlaps).tolist()

    @torch.no_grad()
    def _average(self) -> None:
        weight = self.hyperparameters.newest(self.updates)
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter, weight)


def _kernels(like: Tensor) -> TrainingKernels | None:
    return load_kernels() if like.device.type == "cpu" and like.dtype == torch.float32 else None
