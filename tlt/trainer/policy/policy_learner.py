"""All ranks of a group hold the same weights after every update, and every token counts the same.

Gradients are reduced once per minibatch, normalised beforehand by the totals over all ranks. After
an update that raises, weights belong to no version: load or broadcast before the next one.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.errors import RankError
from tlt.protocol.shared_values import UpdateMetrics
from tlt.trainer.collectives import broadcast, reduce_sum
from tlt.trainer.named_tensors import copy_named
from tlt.trainer.policy.adamw import NamedAdamW
from tlt.trainer.policy.attention_choice import set_attention
from tlt.trainer.policy.compile_layers import compile_layers, is_compiling_worthwhile
from tlt.trainer.policy.flat_gradients import FlatGradients, flat_gradients
from tlt.trainer.policy.layer_probe import decoder_layers
from tlt.trainer.policy.learning_rate import learning_rate
from tlt.trainer.policy.micro_batches import MicroBatch
from tlt.trainer.policy.model_loading import context_limit, load_model, require_valid_tokens
from tlt.trainer.policy.precision_choice import choose_bfloat16
from tlt.trainer.policy.samples import Minibatch
from tlt.trainer.policy.update_passes import PolicyModels, UpdatePasses


class PolicyLearner:
    def __init__(
        self,
        model_dir: str,
        spec: AlgorithmSpec,
        max_context: int | None,
        device: torch.device,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`busy` is entered for long work in which `between` can't be called."""
        self._spec = spec
        policy = load_model(model_dir, device)
        self._limit = context_limit(policy, max_context)
        bfloat16 = choose_bfloat16(policy, spec, self._limit)
        packed = set_attention(policy, spec, self._limit, bfloat16)
        self._may_compile = spec.compile is not False
        self._busy = busy
        self._last_update_seconds = 0.0
        if spec.gradient_checkpointing:
            _checkpoint_layers(policy)
        # a tied head appears once, under its first name
        self._parameters: dict[str, Tensor] = dict(policy.named_parameters())
        self._optimiser = NamedAdamW(self._parameters, spec)
        reference: PreTrainedModel | None = None
        if spec.kl_coefficient > 0:
            reference = load_model(model_dir, device).requires_grad_(False)
            set_attention(reference, spec, self._limit, bfloat16)
        self._models = PolicyModels(
            policy=policy, reference=reference, spec=spec, bfloat16=bfloat16, packed=packed
        )

    def update(
        self,
        step: int,
        minibatches: Sequence[Minibatch],
        group: ProcessGroup | None,
        between: Callable[[], None],
    ) -> UpdateMetrics:
        """Make one optimiser step per minibatch that has a sample on any rank.

        `between` is called after every micro-batch and may raise to abandon the update.
        """
        models = self._models
        for sample in (sample for minibatch in minibatches for sample in minibatch.samples):
            tokens = (*sample.prompt, *sample.completion)
            require_valid_tokens(models.policy, self._limit, tokens)
        live = [minibatch for minibatch in minibatches if minibatch.total_sequences > 0]
        batches = [models.micro_batches(minibatch.samples) for minibatch in live]
        self._compile_once(step, batches, group)
        began = time.monotonic()
        rate = learning_rate(self._spec, step)
        passes = UpdatePasses(models, group, between)
        old: list[Sequence[Tensor | None]] = [[None] * len(first) for first in batches[:1]]
        with flat_gradients(list(self._parameters.values())) as gradients:
            for index, minibatch in enumerate(live):
                gradients.zero()
                differing = passes.learn(minibatch, batches[index], old[index])
                if index == 0 and len(live) > 1:
                    old += passes.old_logprobs(live[1:], batches[1:], differing)
                passes.sums.add_step(self._step(gradients, rate, group))
        self._last_update_seconds = time.monotonic() - began
        return passes.sums.metrics(rate, models.reference is not None, group)

    def weights(self) -> dict[str, Tensor]:
        """Return the live tensors, under the names of the model's safetensors file."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def load_weights(self, mapping: Mapping[str, Tensor]) -> None:
        tied = self._models.policy.state_dict().keys() - self._parameters.keys()
        given = {name: tensor for name, tensor in mapping.items() if name not in tied}
        copy_named(self._parameters, given, "policy's weights")

    def optimiser_state(self) -> dict[str, Tensor]:
        """Return live tensors: `step`, and `<name>.exp_avg` and `<name>.exp_avg_sq`."""
        return self._optimiser.state()

    def load_optimiser_state(self, mapping: Mapping[str, Tensor]) -> None:
        self._optimiser.load(mapping)

    def broadcast(self, source: int, group: ProcessGroup | None) -> None:
        """Give all ranks the weights and the optimiser state of rank `source`."""
        if group is None:
            return
        steps = torch.tensor([self._optimiser.steps()], device=self._models.device)
        broadcast([steps], source, group)
        if group.rank() != source:
            self._optimiser.reset(int(steps.item()))
        broadcast(list(self._parameters.values()), source, group)
        broadcast(list(self._optimiser.moments().values()), source, group)

    def _compile_once(
        self, step: int, batches: list[list[MicroBatch]], group: ProcessGroup | None
    ) -> None:
        """Compile in the first update for which all ranks find it worthwhile.

        All compile at the same time, because a rank that compiles keeps the others waiting.
        """
        forced = self._spec.compile is True
        first = next((batch for share in batches for batch in share), None)
        if self._spec.compile is False:
            return
        worthwhile = is_compiling_worthwhile(self._spec, step, self._last_update_seconds)
        ready = not self._may_compile or ((forced or worthwhile) and first is not None)
        votes = torch.tensor([not ready, self._may_compile], dtype=torch.int32)
        votes = votes.to(self._models.device)
        reduce_sum(votes, group)
        against, waiting = votes.tolist()
        if against or not waiting:
            return
        with self._busy():
            if self._may_compile and first is not None:
                self._may_compile = False
                compile_layers(self._models.policy, first, self._models.bfloat16, forced)
            reduce_sum(votes, group)

    def _step(self, gradients: FlatGradients, rate: float, group: ProcessGroup | None) -> float:
        """Make an optimiser step, and return the gradient's norm."""
        gradients.reduce(group)
        norm = gradients.clip(self._spec.gradient_clip)
        if not math.isfinite(norm):
            # after the reduce, so that all ranks stop here
            raise RankError("the gradient is not finite; the weights were left as they were")
        self._optimiser.step(rate)
        return norm


def _checkpoint_layers(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Transformers checkpoints only layers in training mode; their parts stay free of dropout
    for layer in decoder_layers(model):
        layer.training = True
        # some layers call the dropout function with a rate of their own
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
