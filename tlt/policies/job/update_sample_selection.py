"""Choose the samples that a policy update trains on."""

import msgspec

from tlt.config import JobSpec
from tlt.id_types import Member, Step
from tlt.policies.job.advantages import compute_advantages
from tlt.policies.job.rollout_batch import Group, RolloutBatch
from tlt.policies.job.sample_sharding import Sample


class UpdatePlan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    samples: tuple[Sample, ...]
    # answers without an advantage: nothing is computed for them, but they count in the averages
    silent: tuple[Sample, ...] = ()


def plan_update(batch: RolloutBatch, spec: JobSpec) -> UpdatePlan:
    """Leave out dropped answers.

    Answers without advantages, as in a group in which all scored the same, are learned from only
    if a penalty keeps the policy near the first one.
    """
    algorithm = spec.algorithm
    groups = [(prompt, _kept(group)) for prompt, group in sorted(batch.groups.items())]
    advantages = compute_advantages(
        [[reward for _, reward, _ in kept] for _, kept in groups],
        algorithm.advantage,
        algorithm.normalise_advantage,
    )
    samples: list[Sample] = []
    silent: list[Sample] = []
    for (prompt, kept), of_group in zip(groups, advantages, strict=True):
        teaches = of_group is not None or algorithm.kl_coefficient > 0
        for (index, _, length), advantage in zip(kept, of_group or [0.0] * len(kept), strict=True):
            part = samples if teaches else silent
            part.append(Sample(prompt, Member(index), advantage, length))
    if not samples:
        silent.clear()
    return UpdatePlan(step=batch.step, samples=tuple(samples), silent=tuple(silent))


def _kept(group: Group) -> list[tuple[int, float, int]]:
    """Return index, reward and length of a group's answers that were scored and aren't empty."""
    return [
        (index, answer.reward, answer.length)
        for index, answer in enumerate(group.members)
        if answer.reward is not None and answer.length > 0
    ]
