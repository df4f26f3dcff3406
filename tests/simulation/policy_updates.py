"""Simulate policy updates: one collective over all ranks that were commanded to join."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.simulation.incarnation import INITIAL, WorkerIncarnation, blob, meeting
from tests.simulation.worker_events import JOB
from tlt.base.id_types import Incarnation, PolicyVersion
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import (
    CheckpointCommitted,
    PolicyPublished,
    PolicyUpdateFinished,
    RunEvent,
)
from tlt.protocol.refs import Checkpoint, MinibatchShare, PolicyRef

if TYPE_CHECKING:
    from tests.simulation.world import World


class PolicyUpdates:
    def __init__(self, world: "World") -> None:
        self.world = world
        # by name of the collective
        self.learners: dict[str, frozenset[Incarnation]] = {}

    def expect(self, command: UpdatePolicy) -> None:
        known = self.learners.get(meeting(command), frozenset())
        self.learners[meeting(command)] = known | {command.incarnation}

    def start(self, incarnation: WorkerIncarnation, command: UpdatePolicy) -> None:
        assert incarnation.training_session is None, "it trains"
        incarnation.assignment = None
        incarnation.learning, incarnation.trained = command, False

    def groups(self) -> list[str]:
        learning = (incarnation.learning for incarnation in self.world.incarnations.values())
        return sorted({meeting(learn) for learn in learning if learn is not None})

    def _members(self, group: str) -> list[WorkerIncarnation]:
        """Return the members that have joined; stopped or dead ranks keep the others waiting."""
        return [
            incarnation
            for incarnation in self.world.incarnations.values()
            if not incarnation.stopped
            and incarnation.learning is not None
            and meeting(incarnation.learning) == group
        ]

    def is_complete(self, group: str) -> bool:
        members = self._members(group)
        fresh = [incarnation for incarnation in members if not incarnation.trained]
        return len(fresh) == len(self.learners[group]) and len(fresh) > 0

    def is_broken(self, group: str) -> bool:
        """Return True if a member will never join."""
        alive = {incarnation.number for incarnation in self.world.incarnations.values()}
        return not self.learners[group] <= alive or any(
            incarnation.stopped
            for incarnation in self.world.incarnations.values()
            if incarnation.number in self.learners[group]
        )

    def update(self, group: str) -> None:
        """Make the same update on all ranks of a complete collective."""
        members = self._members(group)
        by_rank = sorted(members, key=_first_rank)
        for incarnation in members:
            learn = incarnation.learning
            assert learn is not None
            if learn.reload:
                incarnation.content, incarnation.shards_of = INITIAL, group
            if learn.restore is not None:
                assert learn.restore.weights.digest in self.world.committed
                incarnation.content = learn.restore.weights.digest
        for incarnation in members:
            learn = incarnation.learning
            assert learn is not None
            if learn.sync_from is not None:
                incarnation.content = _holder(by_rank, learn.sync_from).content
        if self.world.spec.algorithm.shards != 1:
            self._check_shards(members)
        before = {incarnation.content for incarnation in members}
        assert len(before) == 1, f"{group}: the ranks start from {before}"
        learn = by_rank[0].learning
        assert learn is not None
        shares = [
            incarnation.learning.minibatches
            for incarnation in by_rank
            if incarnation.learning is not None
        ]
        after = updated(before.pop(), shares)
        self.world.checks.check_repeated_update(learn, after)
        for incarnation in members:
            incarnation.content, incarnation.trained = after, True
            if not self.world.spec.algorithm.staleness:
                incarnation.version = learn.version + 1

    def _check_shards(self, members: list[WorkerIncarnation]) -> None:
        """Assert that all who split the weights are there, and nobody else."""
        (group,) = {incarnation.shards_of for incarnation in members}
        assert group is not None
        assert {incarnation.number for incarnation in members} == self.learners[group]

    def finish_update(self, incarnation: WorkerIncarnation) -> None:
        learn = incarnation.learning
        assert learn is not None
        incarnation.learning, incarnation.trained = None, False
        version = PolicyVersion(learn.version + 1)
        origin: dict[str, Any] = {
            "job": JOB,
            "epoch": learn.epoch,
            "step": learn.step,
            "attempt": learn.attempt,
        }
        events: list[RunEvent] = []
        if learn.first_rank == 0:
            weights = blob(incarnation.content)
            adapter = blob(f"adapter in {incarnation.content}")
            kept = self.world.committed if learn.checkpoint else self.world.flight
            kept |= {weights.digest, adapter.digest}
            if learn.checkpoint:
                optimiser = blob(f"optimiser of {incarnation.content}")
                self.world.committed.add(optimiser.digest)
                saved = Checkpoint(
                    version=version, weights=weights, optimiser=optimiser, adapter=adapter
                )
                events.append(CheckpointCommitted(**origin, checkpoint=saved))
            policy = PolicyRef(version=version, weights=weights, adapter=adapter)
            events.append(PolicyPublished(**origin, policy=policy, metrics=None))
        finished = PolicyUpdateFinished(
            **origin,
            worker=incarnation.worker,
            incarnation=incarnation.number,
            version=version,
        )
        self.world.workers.report(incarnation, *events, finished)


def updated(content: str, shares: Sequence[tuple[MinibatchShare, ...]]) -> str:
    """Return the weights after an update: a name made of the answers in it."""
    answers = sorted(
        ref.answer.digest
        for worker in shares
        for share in worker
        for rank in share.ranks
        for ref in rank
    )
    if not answers:
        return content  # nothing to learn: the bytes, and so the digest, stay the same
    number = mix(*content.encode(), *"".join(answers).encode())
    return f"{number:016x}"


def _first_rank(incarnation: WorkerIncarnation) -> int:
    assert incarnation.learning is not None
    return incarnation.learning.first_rank


def _holder(by_rank: list[WorkerIncarnation], rank: int) -> WorkerIncarnation:
    return next(
        incarnation for incarnation in reversed(by_rank) if _first_rank(incarnation) <= rank
    )
