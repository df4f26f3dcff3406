"""Simulate the stream of prompts, which delivers at least once, with a limit of attempts."""

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import msgspec

from tests.simulation.worker_events import JOB
from tlt.base.id_types import Attempt, Incarnation, Member
from tlt.protocol.commands import (
    IssuePrompts,
    PromptIssued,
    RequeuePrompts,
    ResumeAnswers,
    StartRollout,
)
from tlt.protocol.events import RolloutDropped
from tlt.store.redis_keys import queue_of

if TYPE_CHECKING:
    from tests.simulation.world import World


class PromptQueue:
    def __init__(self, world: "World") -> None:
        self.world = world
        # by number: batches that may be open at once have queues of their own
        self.queues: defaultdict[int, deque[tuple[int, PromptIssued]]] = defaultdict(deque)
        # pulled and not acknowledged
        self.pending: dict[Incarnation, dict[int, PromptIssued]] = {}
        self._entries = 0

    def queue_of(self, batch: PromptIssued | StartRollout) -> deque[tuple[int, PromptIssued]]:
        staleness = self.world.spec.algorithm.staleness
        return self.queues[queue_of(staleness, batch.purpose, batch.step)]

    def clear(self) -> None:
        self.queues.clear()
        self.pending.clear()

    def issue(self, command: IssuePrompts) -> None:
        for prompt, count in zip(command.prompts, command.counts, strict=True):
            for member in range(count):
                self._enqueue(
                    PromptIssued(
                        job=JOB,
                        epoch=command.epoch,
                        step=command.step,
                        attempt=Attempt(0),
                        purpose=command.purpose,
                        prompt=prompt,
                        member=Member(member),
                        tokens=(1,),
                    )
                )

    def resume(self, command: ResumeAnswers) -> None:
        for each in command.answers:
            key = each.step, each.prompt, each.member
            queued = [prompt for queue in self.queues.values() for _, prompt in queue]
            waiting = [(p.step, p.prompt, p.member) for p in queued if p.purpose == "train"]
            assert key not in waiting, f"{key} is in the queue already"
            self._enqueue(
                PromptIssued(
                    job=JOB,
                    epoch=command.epoch,
                    step=each.step,
                    attempt=each.attempt,
                    purpose="train",
                    prompt=each.prompt,
                    member=each.member,
                    tokens=(1,),
                    excused=each.excused,
                    prefix=each.prefix,
                )
            )

    def _enqueue(self, prompt: PromptIssued) -> None:
        self._entries += 1
        self.queue_of(prompt).append((self._entries, prompt))

    def requeue(self, command: RequeuePrompts) -> None:
        for held in self.pending.pop(command.incarnation, {}).values():
            again = msgspec.structs.replace(
                held, attempt=Attempt(held.attempt + 1), excused=held.excused + command.excused
            )
            if again.attempt - again.excused < self.world.spec.rollout.max_tries:
                self._enqueue(again)
                continue
            dropped = RolloutDropped(
                job=JOB,
                epoch=held.epoch,
                step=held.step,
                attempt=held.attempt,
                purpose=held.purpose,
                prompt=held.prompt,
                member=held.member,
                reason="lost too often",
            )
            self.world.post("requeue", dropped)
