"""Choose the samples that a policy update trains on."""

import math

import msgspec

from tlt.base.id_types import Step
from tlt.policies.algorithm.advantages import agree, compute_advantages
from tlt.policies.algorithm.sample_sharding import Sample
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.spec.config import AlgorithmSpec, JobSpec


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    samples: tuple[Sample, ...]
    # answers without an advantage: nothing is computed for them, but they count in the averages
    silent: tuple[Sample, ...] = ()


def plan_update(batch: RolloutBatch, spec: JobSpec) -> UpdatePlan:
    """Leave out answers without a reward, and if the spec says so those that were cut off.

    Answers without advantages, as in a group in which all scored the same, are learned from only
    if a penalty or a bonus beside the reward is. With dynamic sampling such groups are left out,
    and don't count in the averages: others took their place.
    """
    algorithm = spec.algorithm
    groups = [
        (prompt, group.scored())
        for prompt, group in sorted(batch.groups.items())
        if not (algorithm.dynamic_sampling and agree(group.rewards()))
    ]
    advantages = compute_advantages(
        [[reward for _, _, reward in kept] for _, kept in groups],
        algorithm.advantage,
        algorithm.normalise_advantage,
    )
    samples: list[Sample] = []
    silent: list[Sample] = []
    for (prompt, kept), of_group in zip(groups, advantages, strict=True):
        teaches = of_group is not None or algorithm.learns_without_advantage
        part = samples if teaches else silent
        for (member, answer, _), advantage in zip(kept, of_group or [0.0] * len(kept), strict=True):
            if answer.truncated and algorithm.mask_truncated:
                continue
            assert answer.ref is not None, "an answer that has a score has finished"
            part.append(
                Sample(prompt, member, advantage, answer.length, answer.ref, answer.prompt_length)
            )
    if not samples:
        silent.clear()
    return UpdatePlan(step=batch.step, samples=tuple(samples), silent=tuple(silent))


def count_minibatches(plan: UpdatePlan, algorithm: AlgorithmSpec) -> int:
    """Keep the size of minibatches where dynamic sampling found too few groups.

    Without dynamic sampling the silent samples keep it.
    """
    if not algorithm.dynamic_sampling:
        return algorithm.minibatches
    groups = len({sample.prompt for sample in plan.samples})
    return max(1, math.ceil(algorithm.minibatches * groups / algorithm.prompts_per_step))
