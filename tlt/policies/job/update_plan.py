"""What an update learns from, and who does which part of it."""

from collections.abc import Sequence

import msgspec

from tlt.config import JobSpec
from tlt.ids import Attempt, Epoch, JobId, Member, PolicyVersion, Step
from tlt.policies.job.advantages import group_advantages
from tlt.policies.job.rollout_batch import RolloutBatch
from tlt.policies.job.sample_sharding import Sample, shares
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.records import WorkerInfo
from tlt.protocol.refs import Checkpoint


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    samples: tuple[Sample, ...]


def plan(done: RolloutBatch, spec: JobSpec) -> Plan:
    """The samples of a settled round; dropped answers and groups that all agree are left out."""
    samples: list[Sample] = []
    for prompt, group in sorted(done.groups.items()):
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
    return Plan(step=done.step, samples=tuple(samples))


def learn_commands(
    *,
    job: JobId,
    epoch: Epoch,
    spec: JobSpec,
    attempt: int,
    version: PolicyVersion,
    plan: Plan,
    workers: Sequence[tuple[WorkerInfo, PolicyVersion]],
    restore: Checkpoint | None,
) -> list[UpdatePolicy]:
    sizes = [info.ranks for info, _ in workers]
    parts = shares(plan.samples, sizes, spec.algorithm.minibatches, spec.seed, plan.step)
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    holders = [firsts[i] for i, (_, trained) in enumerate(workers) if trained == version]
    in_step = restore is not None or len(holders) == len(workers)
    reached = version + 1
    algorithm = spec.algorithm
    due = reached % algorithm.checkpoint_every == 0 or reached == algorithm.steps
    leader = workers[0][0]
    return [
        UpdatePolicy(
            worker=info.worker,
            incarnation=info.incarnation,
            job=job,
            epoch=epoch,
            step=plan.step,
            attempt=Attempt(attempt),
            version=version,
            rendezvous=leader.rendezvous,
            group=f"{job}/{epoch}/{attempt}/{version}",
            world=sum(sizes),
            first_rank=firsts[i],
            restore=restore,
            sync_from=None if in_step else holders[0],
            minibatches=parts[i],
            checkpoint=due,
        )
        for i, (info, _) in enumerate(workers)
    ]
