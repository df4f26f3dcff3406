"""A drafter learns from its policy one micro-batch per call, and may stop after any of them.

The drafter that is used is a running mean of the weights: it is good whenever training stops, so
the length of training need not be known. An update whose loss or gradient isn't finite changes
nothing but a counter, and an interrupted one changes nothing at all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.kernels.training_kernels import TrainingKernels, load_kernels
from tlt.models.eagle_drafter import Drafter, new_drafter
from tlt.models.float32_product import wide
from tlt.trainer.drafter.delta_merging import DrafterSnapshot
from tlt.trainer.drafter.distillation_loss import Heads, distillation_loss
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.interruptible_matmul import check_layers
from tlt.trainer.drafter.micro_batches import DrafterBatch
from tlt.trainer.drafter.muon import MuonWithAdam
from tlt.trainer.drafter.samples import EmbeddingAndHead
from tlt.trainer.drafter.unrolled_chains import unroll
from tlt.trainer.named_tensors import copy_named, require_same_shapes
from tlt.trainer.policy.speed.fused_layers import fuse
from tlt.trainer.tensor_cores import uses_tensor_cores


@dataclass(frozen=True, kw_only=True)
class MicroBatchResult:
    rows: int
    # mean cross-entropy of a guess, in nats
    loss: float
    # by step of the chain: probability that drafter and policy have in common
    overlap: tuple[float, ...]
    # the update was not finite and changed nothing
    skipped: bool


class DrafterLearner:
    def __init__(
        self,
        drafter: Drafter,
        embedding_and_head: EmbeddingAndHead,
        hyperparameters: DrafterHyperparameters,
        sizes: Tensor,
    ) -> None:
        """Take ownership of the drafter, on the weights' device and in float32 at least.

        `sizes` come from `measure_input_sizes`.
        """
        self.hyperparameters = hyperparameters
        self.ends = embedding_and_head
        # updates behind the weights, those of other members included
        self.updates = 0
        self.skipped = 0
        self._drafter = drafter
        self._parameters = dict(drafter.named_parameters())
        self._mean = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._optimiser = MuonWithAdam(self._parameters, {"fc.weight": sizes})
        self._kernels = _kernels_for(embedding_and_head.head)
        if self._kernels is not None:
            fuse(drafter, self._kernels)

    @property
    def device(self) -> torch.device:
        return self.ends.head.device

    @uses_tensor_cores
    def learn(
        self, batch: DrafterBatch, check: CheckInterrupt = never_interrupt, members: int = 1
    ) -> MicroBatchResult:
        """Make one update; `check` is called often and gives the micro-batch up by raising.

        `members` are the learners whose work is averaged with this one's.
        """
        with check_layers(self._drafter, batch.rows, check):
            loss, overlaps = self._loss(batch, check)
            slopes = torch.autograd.grad(loss, list(self._parameters.values()))
        gradients = dict(zip(self._parameters, slopes, strict=True))
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        # read at once, because the host waits for the device here
        value, size, *overlap = torch.stack([loss.detach(), norm, *overlaps]).tolist()
        skipped = not (math.isfinite(value) and math.isfinite(size))
        if skipped:
            self.skipped += 1
        else:
            rates = self.hyperparameters.rates(self.updates, self._optimiser.steps, members)
            self._optimiser.step(gradients, *rates, check)
            self.updates += 1
            self._average()
        return MicroBatchResult(
            rows=batch.rows, loss=value, overlap=tuple(overlap), skipped=skipped
        )

    def drafter(self) -> Drafter:
        """Return a copy with the running mean of the weights, in the policy's format."""
        with torch.no_grad():
            copy = new_drafter(self._drafter.config).to(self.ends.head)
            copy.load_state_dict({**self._drafter.state_dict(), **self._mean})
        return copy.requires_grad_(False)

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors that another learner needs to go on with the next micro-batch."""
        return {
            **({} if self._drafter.d2t is None else {"d2t": self._drafter.d2t}),
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
        if self._drafter.d2t is not None:
            self._drafter.d2t.copy_(state["d2t"])
        self._optimiser.load(parts["optimiser"])
        self.updates = int(state["updates"])
        self.skipped = int(state["skipped"])

    def snapshot(self, check: CheckInterrupt = never_interrupt) -> DrafterSnapshot:
        """Copy weights and mean to the host, where they don't take a device's room."""
        live, tensors = self.live(), dict[str, Tensor]()
        for name, tensor in live.tensors.items():
            check()
            tensors[name] = tensor.to("cpu", copy=True)
        copied = None if live.d2t is None else live.d2t.to("cpu", copy=True)
        return DrafterSnapshot(tensors=tensors, updates=live.updates, d2t=copied)

    def live(self) -> DrafterSnapshot:
        """Return the tensors that the next micro-batch changes."""
        return DrafterSnapshot(tensors=self._weights(), updates=self.updates, d2t=self._drafter.d2t)

    @torch.no_grad()
    def rebase(self, since: DrafterSnapshot, onto: DrafterSnapshot) -> None:
        """Move what was learned after `since` onto other weights and tokens; the moments stay."""
        weights = self._weights()
        require_same_shapes(weights, onto.tensors, "drafter's base")
        for name, tensor in weights.items():
            tensor.sub_(since.tensors[name].to(tensor.device))
            tensor.add_(onto.tensors[name].to(tensor.device))
        if self._drafter.d2t is not None and onto.d2t is not None:
            self._drafter.d2t.copy_(onto.d2t)
        self.updates += onto.updates - since.updates

    def _weights(self) -> dict[str, Tensor]:
        return {
            **{f"weights.{name}": p.detach() for name, p in self._parameters.items()},
            **{f"mean.{name}": tensor for name, tensor in self._mean.items()},
        }

    def _loss(self, batch: DrafterBatch, check: CheckInterrupt) -> tuple[Tensor, list[Tensor]]:
        """Return the mean over all measurable guesses, later steps weighing less, and overlaps."""
        head = self.ends.head
        total, weight = head.new_zeros((), dtype=wide(head.dtype)), 0.0
        overlaps: list[Tensor] = []
        heads = Heads.of(self._drafter, head)
        rows = [measurable.nonzero()[:, 0] for measurable in batch.measurable]
        measured = torch.cat(rows).to(batch.starts.device).split([len(found) for found in rows])
        readouts = unroll(self._drafter, batch, self.ends.embedding, self._kernels, check)
        for step, (readout, found) in enumerate(zip(readouts, measured, strict=True)):
            targets = batch.states[batch.targets[step][found], -1]
            sums = distillation_loss(heads, readout[found], targets, check)
            share = self.hyperparameters.step_discount**step
            total = total + share * sums.loss
            weight += share * len(found)
            overlaps.append(sums.overlap / max(1, len(found)))
        return total / max(1.0, weight), overlaps

    @torch.no_grad()
    def _average(self) -> None:
        weight = self.hyperparameters.mean_weight(self.updates)
        for name, parameter in self._parameters.items():
            self._mean[name].lerp_(parameter, weight)


def _kernels_for(like: Tensor) -> TrainingKernels | None:
    return load_kernels() if like.device.type == "cpu" and like.dtype == torch.float32 else None
