"""The compared sides: the policy trainer and plain Transformers, each doing one update."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlt.spec.config import AlgorithmSpec, JobSpec
from tlt.trainer.policy.loss.loss_variants import TOKEN_LOSSES
from tlt.trainer.policy.loss.policy_loss import LogProbs, policy_loss
from tlt.trainer.policy.model.micro_batches import (
    MicroBatch,
    Minibatch,
    PolicySample,
    build_micro_batches,
    group_by_length,
    pack,
    pad,
)
from tlt.trainer.policy.policy_learner import PolicyLearner, PolicyModels


class SameBuckets(PolicyLearner):
    """Micro-batches with the same samples as those of the reference."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._models = _SameBucketsModels(**vars(self._models))


class _SameBucketsModels(PolicyModels):
    def micro_batches(self, samples: Sequence[PolicySample]) -> list[MicroBatch]:
        form = pack if self.packed else pad
        chosen = group_by_length(samples, self.spec.chosen_microbatch_tokens)
        return [form(bucket, self.device) for bucket in chosen]


class Ours:
    def __init__(
        self, job: JobSpec, device: torch.device, kind: type[PolicyLearner], **changes: Any
    ) -> None:
        spec = with_changes(job, **changes)
        self.learner = kind(job.policy.path, spec, job.policy.max_context, device)
        self._start = {name: w.clone() for name, w in self.learner.weights().items()}
        self._optimiser = {"step": torch.tensor(0)}

    def update(self, work: Sequence[Minibatch]) -> None:
        self.learner.update(0, work, None, lambda: None)

    def reset(self) -> None:
        self.learner.load_weights(self._start)
        self.learner.load_optimiser_state(self._optimiser)


class Reference:
    def __init__(self, job: JobSpec, device: torch.device, bfloat16: bool, old: bool) -> None:
        self._spec = job.algorithm
        self._device, self._bfloat16, self._old = device, bfloat16, old
        self.model = _transformers(job, device)
        self._start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.reset()

    def update(self, work: Sequence[Minibatch]) -> None:
        batches = [self.batches(share) for share in work]
        old: list[list[Tensor | None]] = [[None] * len(share) for share in batches]
        if self._old:
            with torch.no_grad():
                for index, share in enumerate(batches[1:], start=1):
                    old[index] = [self._logprobs(batch) for batch in share]
        for index, share in enumerate(work):
            self._optimiser.zero_grad()
            self.backward(share, batches[index], old[index])
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._spec.gradient_clip)
            self._optimiser.step()

    def batches(self, share: Minibatch) -> list[MicroBatch]:
        return build_micro_batches(
            share.samples, self._spec.chosen_microbatch_tokens, self._device, packed=False
        )

    def backward(
        self, share: Minibatch, batches: list[MicroBatch], old: Sequence[Tensor | None]
    ) -> None:
        for batch, before in zip(batches, old, strict=True):
            current = self._logprobs(batch)
            known = current.detach() if before is None else before
            scores = LogProbs(current, known, None, torch.zeros_like(known))
            loss, _ = policy_loss(self._spec, TOKEN_LOSSES[self._spec.loss], batch, share, scores)
            loss.backward()

    def reset(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._start[name])
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=self._spec.learning_rate, betas=self._spec.betas
        )

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            logits = self.model(input_ids=batch.tokens, use_cache=False).logits
        chosen = logits.flatten(0, 1)[batch.positions].float() / batch.temperature[:, None]
        return chosen.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


def with_changes(job: JobSpec, **changes: Any) -> AlgorithmSpec:
    return msgspec.structs.replace(job.algorithm, **changes)


def _transformers(job: JobSpec, device: torch.device) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        job.policy.path, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.to(device).eval()


def interleaved(
    sides: Mapping[str, Ours | Reference],
    work: list[list[Minibatch]],
    device: torch.device,
    repetitions: int,
) -> dict[str, float]:
    """Return median seconds of all updates in `work`, interleaved, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(repetitions + 1):
        for name, side in sides.items():
            side.reset()
            began = _clock(device)
            for update in work:
                side.update(update)
            if pair > 0:
                seconds[name].append(_clock(device) - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _clock(device: torch.device) -> float:
    """Return CPU seconds on a CPU, whose cores others may share, and wall seconds otherwise."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()
