"""All ranks of a group hold the same weights after every update, and every token counts the same.

Gradients are reduced once per minibatch, normalised by the totals over all ranks beforehand. An
update that raises leaves weights of no version: load or broadcast before the next one.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tlt.config import AlgorithmSpec
from tlt.errors import RankError
from tlt.learn.batching import Microbatch, microbatches
from tlt.learn.collectives import broadcast
from tlt.learn.gradients import FlatGradients, flat_gradients
from tlt.learn.loading import context_limit, head, load_model, require_fit, states
from tlt.learn.losses import objective
from tlt.learn.metrics import Tally
from tlt.learn.optimiser import NamedAdamW, copy_named
from tlt.learn.sample import Minibatch
from tlt.learn.schedule import learning_rate
from tlt.learn.scores import score
from tlt.messages import UpdateMetrics


class PolicyLearner:
    def __init__(
        self, model_dir: str, spec: AlgorithmSpec, max_context: int | None, device: torch.device
    ) -> None:
        self._spec = spec
        self._device = device
        self._model = load_model(model_dir, spec, device)
        self._limit = context_limit(self._model, max_context)
        if spec.gradient_checkpointing:
            _checkpoint_layers(self._model)
        # a tied head appears once, under its first name
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._optimiser = NamedAdamW(self._parameters, spec)
        self._reference: PreTrainedModel | None = None
        if spec.kl_coefficient > 0:
            self._reference = load_model(model_dir, spec, device).requires_grad_(False)

    def update(
        self,
        step: int,
        minibatches: Sequence[Minibatch],
        group: ProcessGroup | None,
        between: Callable[[], None],
    ) -> UpdateMetrics:
        """One optimiser step per minibatch that has a sample on any rank.

        `between` is called after every micro-batch and may raise to abandon the update.
        """
        for sample in (sample for share in minibatches for sample in share.samples):
            require_fit(self._model, self._limit, (*sample.prompt, *sample.completion))
        live = [share for share in minibatches if share.total_sequences > 0]
        batches = [self._microbatches(share) for share in live]
        # The first minibatch's old log-probs are those of its own forward pass.
        old = [self._old_logprobs(later, between) for later in batches[1:]]
        rate = learning_rate(self._spec, step)
        tally = Tally(self._device)
        with flat_gradients(list(self._parameters.values())) as gradients:
            for index, share in enumerate(live):
                known = old[index - 1] if index > 0 else [None] * len(batches[index])
                gradients.zero()
                for batch, before in zip(batches[index], known, strict=True):
                    self._accumulate(share, batch, before, tally)
                    between()
                tally.stepped(self._step(gradients, rate, group))
        return tally.metrics(rate, self._reference is not None, group)

    def weights(self) -> dict[str, Tensor]:
        """The live tensors, under the names of the model's safetensors file: read, never keep."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def load_weights(self, mapping: Mapping[str, Tensor]) -> None:
        tied = self._model.state_dict().keys() - self._parameters.keys()
        given = {name: tensor for name, tensor in mapping.items() if name not in tied}
        copy_named(self._parameters, given, "policy's weights")

    def optimiser_state(self) -> dict[str, Tensor]:
        """`step`, and for each parameter `<name>.exp_avg` and `<name>.exp_avg_sq`: live tensors."""
        return self._optimiser.state()

    def load_optimiser_state(self, mapping: Mapping[str, Tensor]) -> None:
        self._optimiser.load(mapping)

    def broadcast(self, source: int, group: ProcessGroup | None) -> None:
        """Everybody goes on with the weights and the optimiser state of rank `source`."""
        if group is None:
            return
        steps = torch.tensor([self._optimiser.steps()], device=self._device)
        broadcast([steps], source, group)
        if group.rank() != source:
            self._optimiser.start(int(steps.item()))
        broadcast(list(self._parameters.values()), source, group)
        broadcast(list(self._optimiser.moments().values()), source, group)

    def _microbatches(self, share: Minibatch) -> list[Microbatch]:
        return microbatches(share.samples, self._spec.microbatch_tokens, self._device)

    def _old_logprobs(self, batches: list[Microbatch], between: Callable[[], None]) -> list[Tensor]:
        old: list[Tensor] = []
        for batch in batches:
            with torch.no_grad():
                old.append(self._scores(self._model, batch)[0])
            between()
        return old

    def _accumulate(
        self, share: Minibatch, batch: Microbatch, old: Tensor | None, tally: Tally
    ) -> None:
        current, entropy = self._scores(self._model, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._scores(self._reference, batch)
        before = current.detach() if old is None else old
        loss, figures = objective(self._spec, batch, share, current, before, reference)
        loss.backward()
        tally.add(loss, entropy, figures, batch.samples)

    def _step(self, gradients: FlatGradients, rate: float, group: ProcessGroup | None) -> float:
        gradients.reduce(group)
        norm = gradients.clip(self._spec.gradient_clip)
        if not math.isfinite(norm):
            # after the reduce, so that all ranks stop here
            raise RankError("the gradient is not finite; the weights were left as they were")
        self._optimiser.step(rate)
        return norm

    def _scores(self, model: PreTrainedModel, batch: Microbatch) -> tuple[Tensor, Tensor]:
        enabled = self._spec.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=enabled):
            hidden = states(model, batch.tokens)
        chosen = hidden.flatten(0, 1).index_select(0, batch.positions)
        return score(chosen, head(model), batch.targets, batch.temperature)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Transformers checkpoints only layers in training mode; their parts stay free of dropout.
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
