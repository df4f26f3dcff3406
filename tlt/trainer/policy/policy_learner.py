"""All ranks of a group hold the same weights after every update, and every token counts the same.

Gradients are reduced once per minibatch, normalised by the totals over all ranks beforehand. An
update that raises leaves weights of no version: load or broadcast before the next one.
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
from tlt.protocol.records import UpdateMetrics
from tlt.trainer.collectives import broadcast, reduce_sum
from tlt.trainer.policy.adamw import NamedAdamW, copy_named
from tlt.trainer.policy.attention_choice import set_attention
from tlt.trainer.policy.compile_layers import compile_layers, is_compiling_worthwhile
from tlt.trainer.policy.flat_gradients import FlatGradients, flat_gradients
from tlt.trainer.policy.grpo_loss import grpo_loss, sampler_mismatch
from tlt.trainer.policy.layer_probe import decoder_layers
from tlt.trainer.policy.learning_rate import learning_rate
from tlt.trainer.policy.logprobs import score_batch
from tlt.trainer.policy.micro_batches import MicroBatch, build_micro_batches
from tlt.trainer.policy.model_loading import context_limit, load_model, require_valid_tokens
from tlt.trainer.policy.precision_choice import choose_bfloat16
from tlt.trainer.policy.samples import Minibatch, PolicySample
from tlt.trainer.policy.update_metrics import MetricSums

# Log-probs nearer than this are one policy's; what is clipped differs by hundreds of times more.
_SAME = 1e-3
# Of later minibatches every so many samples are looked at before their sampler is believed.
_EVERY = 8


class PolicyLearner:
    def __init__(
        self,
        model_dir: str,
        spec: AlgorithmSpec,
        max_context: int | None,
        device: torch.device,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`busy` is entered for what takes its time and has no boundary to call `between` at."""
        self._spec = spec
        self._device = device
        self._model = load_model(model_dir, device)
        self._limit = context_limit(self._model, max_context)
        self._bfloat16 = choose_bfloat16(self._model, spec, self._limit)
        self._packed = set_attention(self._model, spec, self._limit, self._bfloat16)
        self._may_compile = spec.compile is not False
        self._busy = busy
        self._last_update_seconds = 0.0
        if spec.gradient_checkpointing:
            _checkpoint_layers(self._model)
        # a tied head appears once, under its first name
        self._parameters: dict[str, Tensor] = dict(self._model.named_parameters())
        self._optimiser = NamedAdamW(self._parameters, spec)
        self._reference: PreTrainedModel | None = None
        if spec.kl_coefficient > 0:
            self._reference = load_model(model_dir, device).requires_grad_(False)
            set_attention(self._reference, spec, self._limit, self._bfloat16)

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
            require_valid_tokens(self._model, self._limit, (*sample.prompt, *sample.completion))
        live = [share for share in minibatches if share.total_sequences > 0]
        batches = [self._microbatches(share.samples) for share in live]
        self._compile(step, batches, group)
        began = time.monotonic()
        rate = learning_rate(self._spec, step)
        tally = MetricSums(self._device)
        # The first minibatch's old log-probs are those of its own forward pass.
        old: list[Sequence[Tensor | None]] = [[None] * len(first) for first in batches[:1]]
        with flat_gradients(list(self._parameters.values())) as gradients:
            for index, share in enumerate(live):
                gradients.zero()
                apart = torch.zeros((), device=self._device)
                for batch, before in zip(batches[index], old[index], strict=True):
                    current = self._accumulate(share, batch, before, tally)
                    apart += _apart(current, batch)
                    between()
                if index == 0 and len(live) > 1:
                    looked_at = [s for share in live[1:] for s in share.samples[::_EVERY]]
                    if self._believes(looked_at, apart, tally, group, between):
                        old += [[batch.behaviour for batch in share] for share in batches[1:]]
                    else:
                        old += self._old_logprobs(batches[1:], between)
                tally.stepped(self._step(gradients, rate, group))
        self._last_update_seconds = time.monotonic() - began
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

    def _microbatches(self, samples: Sequence[PolicySample]) -> list[MicroBatch]:
        return build_micro_batches(
            samples, self._spec.microbatch_tokens, self._device, self._packed
        )

    def _compile(
        self, step: int, batches: list[list[MicroBatch]], group: ProcessGroup | None
    ) -> None:
        """At most once, in the first update for which it is worth the while on all ranks.

        All at the same time, because who compiles keeps the others waiting.
        """
        forced = self._spec.compile is True
        first = next((batch for share in batches for batch in share), None)
        if self._spec.compile is False:
            return
        worth = forced or is_compiling_worthwhile(self._spec, step, self._last_update_seconds)
        ready = not self._may_compile or (worth and first is not None)
        votes = torch.tensor([not ready, self._may_compile], dtype=torch.int32).to(self._device)
        reduce_sum(votes, group)
        against, waiting = votes.tolist()
        if against or not waiting:
            return
        with self._busy():
            if self._may_compile and first is not None:
                self._may_compile = False
                compile_layers(self._model, first, self._bfloat16, forced)
            reduce_sum(votes, group)

    def _believes(
        self,
        samples: Sequence[PolicySample],
        apart: Tensor,
        tally: MetricSums,
        group: ProcessGroup | None,
        between: Callable[[], None],
    ) -> bool:
        """Whether what the sampler said of later minibatches is what we would say.

        It is if nothing differs on any rank, neither in the first minibatch, of which `apart`
        counts the tokens that do, nor in these samples of the others.
        """
        if self._spec.old_logprobs == "learner":
            return False
        found: list[tuple[Tensor, Tensor]] = []
        for batch in self._microbatches([] if apart.item() else samples):
            known = self._known(batch)
            apart += _apart(known, batch)
            found.append(sampler_mismatch(self._spec, known, batch.behaviour))
            between()
        reduce_sum(apart, group)
        if apart.item():
            return False
        for figures in found:
            tally.compare(*figures)
        return True

    def _old_logprobs(
        self, later: list[list[MicroBatch]], between: Callable[[], None]
    ) -> list[list[Tensor]]:
        old: list[list[Tensor]] = []
        for share in later:
            old.append([])
            for batch in share:
                old[-1].append(self._known(batch))
                between()
        return old

    def _known(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return self._scores(self._model, batch)[0]

    def _accumulate(
        self, share: Minibatch, batch: MicroBatch, old: Tensor | None, tally: MetricSums
    ) -> Tensor:
        """The log-probs of this pass."""
        current, entropy = self._scores(self._model, batch)
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._scores(self._reference, batch)
        before = current.detach() if old is None else old
        loss, figures = grpo_loss(self._spec, batch, share, current, before, reference)
        loss.backward()
        tally.add(loss, entropy, figures, batch.samples, compared=old is not batch.behaviour)
        return current.detach()

    def _step(self, gradients: FlatGradients, rate: float, group: ProcessGroup | None) -> float:
        gradients.reduce(group)
        norm = gradients.clip(self._spec.gradient_clip)
        if not math.isfinite(norm):
            # after the reduce, so that all ranks stop here
            raise RankError("the gradient is not finite; the weights were left as they were")
        self._optimiser.step(rate)
        return norm

    def _scores(self, model: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        return score_batch(model, batch, self._bfloat16)


def _apart(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """How many tokens differ from what their sampler said."""
    return (~((logprobs - batch.behaviour).abs() <= _SAME)).sum()


def _checkpoint_layers(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # Transformers checkpoints only layers in training mode; their parts stay free of dropout.
    for layer in decoder_layers(model):
        layer.training = True
        # Some layers have no part for it and call the function.
        for name, value in vars(layer).items():
            if "drop" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
