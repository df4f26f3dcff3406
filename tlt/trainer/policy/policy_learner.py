"""All ranks of a group hold the same weights after every update, and every token counts the same.

Each rank holds all weights, or its part of each (`shards`); what isn't trained is the folder's.
Gradients are summed over the ranks, normalised beforehand by the totals over all of them. After an
update that raises, weights belong to no version: load or broadcast before the next one.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tlt.policies.algorithm.learning_rate import learning_rate
from tlt.protocol.shared_values import UpdateMetrics
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.collectives import broadcast, reduce_sum
from tlt.trainer.named_tensors import copy_named
from tlt.trainer.policy.adamw import NamedAdamW
from tlt.trainer.policy.flat_gradients import Gradients, flat_gradients
from tlt.trainer.policy.loss.advantages_in_update import (
    AdvantageFunction,
    Penalised,
    Ranks,
    advantages_in_update,
    find_own_advantage,
)
from tlt.trainer.policy.loss.loss_variants import TokenLossFunction, find_token_loss
from tlt.trainer.policy.loss.policy_loss import LogProbs, compare_with_sampler, policy_loss
from tlt.trainer.policy.loss.update_metrics import MetricSums
from tlt.trainer.policy.model.micro_batches import MicroBatch, Minibatch, PolicySample
from tlt.trainer.policy.model.model_loading import context_limit, require_valid_tokens
from tlt.trainer.policy.model.trained_part import ALL_WEIGHTS, TrainedPart
from tlt.trainer.policy.policy_models import PolicyModels, load_policy_models
from tlt.trainer.policy.sharded_models import (
    ShardedPolicyModels,
    copy_into_shards,
    load_sharded_policy_models,
    sharded_gradients,
)
from tlt.trainer.policy.speed.compile_layers import (
    compile_layers,
    compiler_running,
    is_compiling_worthwhile,
)
from tlt.trainer.tensor_cores import uses_tensor_cores

# log-probs of one policy differ by less; ratios that are clipped differ by hundreds of times more
_SAME_POLICY = 1e-3
# one in this many samples of later minibatches is compared with its sampler
_COMPARED_STRIDE = 8


@dataclass
class Share:
    """A micro-batch, its number in the update, and the log-probs that are known of it."""

    batch: MicroBatch
    number: int
    old: Tensor | None = None
    reference: Tensor | None = None


class UpdatePasses:
    def __init__(
        self,
        models: PolicyModels,
        token_loss: TokenLossFunction,
        own_advantage: AdvantageFunction | None,
        group: ProcessGroup | None,
        between: Callable[[], None],
    ) -> None:
        """`between` is called after every micro-batch and may raise to abandon the update."""
        self.sums = MetricSums(models.device)
        self._models = models
        self._token_loss = token_loss
        self._own_advantage = own_advantage
        self._group = group
        self._between = between

    def prepare(self, batches: Sequence[Sequence[MicroBatch]]) -> list[list[Share]]:
        """Number the micro-batches of all minibatches, and compute advantages if ranks have to."""
        counts = [len(batch) for batch in batches]
        shares = [
            [Share(batch, sum(counts[:index]) + place) for place, batch in enumerate(part)]
            for index, part in enumerate(batches)
        ]
        if self._models.spec.advantages_in_update:
            self._compute_advantages([share for part in shares for share in part])
        return shares

    def _compute_advantages(self, shares: Sequence[Share]) -> None:
        spec = self._models.spec
        penalised: list[Penalised] = []
        for share in shares:
            penalty = None
            if spec.penalises_rewards:
                share.old = self._logprobs(share)
                share.reference = self._models.score_reference(share.batch)
                assert share.reference is not None, "a penalty has a reference"
                penalty = spec.kl_coefficient * (share.old - share.reference)
            penalised.append(Penalised(share.batch, penalty))
        ranks = Ranks(self._group, self._models.device)
        found = advantages_in_update(spec, self._own_advantage, penalised, ranks)
        for share, batch in zip(shares, found, strict=True):
            share.batch = batch

    def learn(self, minibatch: Minibatch, shares: Sequence[Share]) -> Tensor:
        """Accumulate gradients, and return how many tokens differ from their sampler."""
        differing = torch.zeros((), device=self._models.device)
        for share in shares:
            current = self._backward(minibatch, share)
            if not share.batch.is_filler:
                differing += _count_differing(current, share.batch)
            self._between()
        return differing

    def find_old_logprobs(
        self,
        later: Sequence[Minibatch],
        shares: Sequence[Sequence[Share]],
        differing: Tensor,
    ) -> None:
        """Find the old log-probs of the minibatches after the first, if they aren't known.

        `differing` counts the tokens of the first minibatch that differ from their sampler.
        """
        # the same on all ranks, because they decide together
        if not later or self._models.spec.penalises_rewards:
            return
        sampled = self._agrees_with_sampler(later, differing)
        for share in (share for part in shares for share in part):
            share.old = share.batch.behaviour if sampled else self._logprobs(share)

    def _logprobs(self, share: Share) -> Tensor:
        with torch.no_grad():
            logprobs, _ = self._models.score(share.batch, share.number)
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
        for number, batch in enumerate(self._models.micro_batches(samples)):
            logprobs = self._logprobs(Share(batch, number))
            if batch.is_filler:
                continue
            differing += _count_differing(logprobs, batch)
            mismatches.append(compare_with_sampler(spec, batch, logprobs))
        reduce_sum(differing, self._group)
        if differing.item():
            return False
        for sampling_kl, beyond in mismatches:
            self.sums.add_comparison(sampling_kl, beyond)
        return True

    def _backward(self, minibatch: Minibatch, share: Share) -> Tensor:
        """Run both passes of a micro-batch, and return its present log-probs."""
        models, batch = self._models, share.batch
        current, entropy = models.score(batch, share.number)
        if share.reference is None:
            share.reference = models.score_reference(batch)
        if batch.is_filler:
            # the other ranks wait for this one's part of each layer
            (0.0 * current.sum()).backward()
            return current.detach()
        if share.old is None:
            share.old = current.detach()
        scores = LogProbs(current, share.old, share.reference, entropy)
        loss, metrics = policy_loss(models.spec, self._token_loss, batch, minibatch, scores)
        loss.backward()
        compared = share.old is not batch.behaviour
        self.sums.add(loss, entropy.detach(), metrics, batch.samples, compared=compared)
        return current.detach()


def _count_differing(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    """Count the tokens whose log-probs differ from their sampler's."""
    return (~((logprobs - batch.behaviour).abs() <= _SAME_POLICY)).sum()


class PolicyLearner:
    def __init__(
        self,
        model_dir: str,
        spec: AlgorithmSpec,
        max_context: int | None,
        device: torch.device,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
        group: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        part: TrainedPart = ALL_WEIGHTS,
    ) -> None:
        """Load the model, or this rank's part of it: shards over the ranks of a `group`.

        `busy` is entered for long work in which `between` can't be called.
        """
        self._spec = spec
        self._busy = busy
        self._last_update_seconds = 0.0
        if group is None:
            self._models = load_policy_models(model_dir, spec, max_context, device, dtype, part)
        else:
            self._models = load_sharded_policy_models(model_dir, spec, group, device, dtype)
        policy = self._models.policy
        self._limit = context_limit(policy, max_context)
        self._may_compile = spec.compile is not False and group is None
        # a tied head appears once, under its first name
        self._parameters: dict[str, Tensor] = dict(policy.named_parameters())
        self._trained = self._models.trained()
        self._optimiser = NamedAdamW(self._trained, spec)
        self._functions = find_token_loss(spec), find_own_advantage(spec)

    @property
    def has_adapter(self) -> bool:
        return self._models.adapter is not None

    @property
    def is_sharded(self) -> bool:
        return isinstance(self._models, ShardedPolicyModels)

    @property
    def device(self) -> torch.device:
        return self._models.device

    @uses_tensor_cores
    def update(
        self,
        step: int,
        minibatches: Sequence[Minibatch],
        group: ProcessGroup | None,
        between: Callable[[], None],
    ) -> UpdateMetrics:
        """Make one optimiser step per epoch and minibatch that has a sample on any rank.

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
        passes = UpdatePasses(models, *self._functions, group, between)
        collect = sharded_gradients if self.is_sharded else flat_gradients
        dropout = models.dropout(step, 0 if group is None else group.rank())
        with dropout, collect(list(self._trained.values())) as gradients:
            shares = passes.prepare(batches)
            for epoch in range(self._spec.epochs):
                for index, minibatch in enumerate(live):
                    gradients.zero()
                    differing = passes.learn(minibatch, shares[index])
                    if epoch == index == 0:
                        passes.find_old_logprobs(live[1:], shares[1:], differing)
                    passes.sums.add_step(self._step(gradients, rate, group))
        self._last_update_seconds = time.monotonic() - began
        return passes.sums.metrics(rate, models.has_reference, self._spec.epochs, group)

    def parameters(self) -> Iterable[Tensor]:
        """Return what is learned; with shards, this rank's part of it."""
        return self._trained.values()

    def weights(self) -> Mapping[str, Tensor]:
        """Return weights under the names of the model's safetensors file.

        They are the live tensors; with an adapter each is merged whenever it is read.
        """
        if self._models.adapter is not None:
            return self._models.adapter.weights
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all weights, without merging any."""
        if self._models.adapter is not None:
            return self._models.adapter.weights.shapes
        return {name: parameter.shape for name, parameter in self._parameters.items()}

    def shards(self) -> Mapping[str, DTensor]:
        """Return this rank's part of each weight, if weights are split over ranks."""
        return cast("Mapping[str, DTensor]", self._parameters)

    def load_weights(self, mapping: Mapping[str, Tensor]) -> None:
        """Load all weights of a policy without an adapter."""
        assert not self.has_adapter, "merged weights don't tell the adapter"
        if self.is_sharded:
            copy_into_shards(self._parameters, mapping, "policy's weights")
            return
        tied = self._models.policy.state_dict().keys() - self._parameters.keys()
        given = {name: tensor for name, tensor in mapping.items() if name not in tied}
        copy_named(self._parameters, given, "policy's weights")

    def adapter(self) -> dict[str, Tensor]:
        """Return the live tensors of the adapter under the names of peft's file."""
        assert self._models.adapter is not None, "the policy has no adapter"
        return {name: p.detach() for name, p in self._models.adapter.parameters.items()}

    def load_adapter(self, mapping: Mapping[str, Tensor]) -> None:
        copy_named(self.adapter(), mapping, "adapter")

    def optimiser_state(self) -> dict[str, Tensor]:
        """Return live tensors: `step`, and `<name>.exp_avg` and `<name>.exp_avg_sq`."""
        return self._optimiser.state()

    def load_optimiser_state(self, mapping: Mapping[str, Tensor]) -> None:
        self._optimiser.load(mapping)

    def save_optimiser(self, folder: Path) -> None:
        """Write this rank's part of the optimiser's state into a folder that all ranks share."""
        self._optimiser.save(folder)

    def load_optimiser(self, folder: Path) -> None:
        """Read what any number of ranks saved."""
        self._optimiser.load_folder(folder)

    def broadcast(self, source: int, group: ProcessGroup | None) -> None:
        """Give all ranks what rank `source` has trained, and its optimiser state."""
        if group is None:
            return
        steps = torch.tensor([self._optimiser.steps()], device=self._models.device)
        broadcast([steps], source, group)
        if group.rank() != source:
            self._optimiser.reset(int(steps.item()))
        broadcast(list(self._trained.values()), source, group)
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
                self._compile(first, forced)
            reduce_sum(votes, group)

    def _compile(self, batch: MicroBatch, forced: bool) -> None:
        models = self._models
        with compiler_running():
            compiled = compile_layers(models.policy, batch, models.bfloat16, forced)
            if compiled and self.has_adapter:
                # without the adapter layers have a graph of their own
                models.score_reference(batch)

    def _step(self, gradients: Gradients, rate: float, group: ProcessGroup | None) -> float | None:
        """Make an optimiser step and return the gradient's norm; None if that isn't finite."""
        gradients.reduce(group)
        norm = gradients.clip(self._spec.gradient_clip)
        # after the reduce, so that all ranks skip the step
        if not math.isfinite(norm):
            return None
        self._optimiser.step(rate)
        return norm
