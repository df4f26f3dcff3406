"""Choose the samples that a policy update trains on."""

import msgspec

from tlt.config import JobSpec
from tlt.id_types import Member, Step
from tlt.policies.job.advantages import group_advantages
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.sample_sharding import Sample


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    samples: tuple[Sample, ...]


def plan_update(batch: RolloutBatch, spec: JobSpec) -> UpdatePlan:
    """Leave out dropped answers, and groups in which all answers scored the same."""
    samples: list[Sample] = []
    for prompt, group in sorted(batch.groups.items()):
        kept = [
            (index, answer.reward, answer.length)
            for index, answer in enumerate(group.members)
            if answer.reward is not None and answer.length > 0
        ]
        advantages = group_advantages(
            [reward for _, reward, _ in kept], spec.algorithm.normalise_advantage
        )
        if advantages is None:
            continue
        for (index, _, length), advantage in zip(kept, advantages, strict=True):
            samples.append(Sample(prompt, Member(index), advantage, length))
    return UpdatePlan(step=batch.step, samples=tuple(samples))
