"""Let environments answer the policy: one conversation for each answer that ranks are writing.

A conversation waits for the environment and for the rank by turns. While it waits for the
environment, its answer takes none of the worker's slots.
"""

import asyncio
from functools import partial

from tlt.actors.worker.agent_conversation import AgentConversation
from tlt.actors.worker.conversation import Conversation
from tlt.actors.worker.environment_conversation import EnvironmentConversation
from tlt.actors.worker.event_outbox import Outbox
from tlt.actors.worker.job_environments import JobEnvironments
from tlt.actors.worker.rank_process import RankProcess
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import JobId, Member, PromptIndex, Purpose, Step
from tlt.errors import ConfigError
from tlt.protocol.commands import OpenJob, PromptIssued
from tlt.protocol.events import RolloutCut, RolloutFinished, WorkerFailed
from tlt.protocol.rank_messages import TurnFinished

AnswerKey = tuple[Step, Purpose, PromptIndex, Member]


class Conversations:
    """The conversations of a worker's ranks, with the environments of the open job."""

    def __init__(self, setup: IncarnationSetup, outbox: Outbox, changed: asyncio.Event) -> None:
        """Set `changed` whenever a slot becomes free."""
        self._setup = setup
        self._outbox = outbox
        self._changed = changed
        self._environments: JobEnvironments | None = None
        self._held: dict[AnswerKey, tuple[Conversation, asyncio.Task[None]]] = {}
        self._failures: asyncio.Queue[tuple[JobId, BaseException]] = asyncio.Queue()

    async def run(self) -> None:
        """Raise what a conversation raises; an environment that can't be loaded fails the job."""
        while True:
            job, failure = await self._failures.get()
            if not isinstance(failure, ConfigError):
                raise failure
            setup = self._setup
            self._outbox.post(
                WorkerFailed(
                    job=job,
                    worker=setup.worker,
                    incarnation=setup.incarnation,
                    error=str(failure),
                )
            )

    @property
    def most(self) -> int | None:
        """Return how many may be held at once; None if the open job has no environments."""
        return None if self._environments is None else self._environments.section.most_open

    def open(self, command: OpenJob) -> None:
        self.close()
        if command.spec.environment:
            self._environments = JobEnvironments(command, command.spec.environment)

    def close(self) -> None:
        """End all conversations and all environments."""
        for _, task in self._held.values():
            task.cancel()
        self._held.clear()
        if self._environments is not None:
            self._environments.close()
        self._environments = None

    def begin(self, rank: RankProcess, prompt: PromptIssued) -> None:
        """Let a rank answer a prompt in turns with an environment of its own."""
        assert self._environments is not None
        is_agent = self._environments.section.is_agent
        kind = AgentConversation if is_agent else EnvironmentConversation
        begun: Conversation = kind(rank, prompt, self._environments)
        task = asyncio.create_task(begun.hold())
        task.add_done_callback(partial(self._note_end, prompt.job))
        self._held[_key(prompt)] = begun, task

    def note_turn(self, turn: TurnFinished) -> None:
        """Go on after a turn of the policy."""
        if (held := self._held.get(_key(turn))) is not None:
            held[0].note_turn(turn)
            self._changed.set()

    def end(self, answer: RolloutFinished | RolloutCut) -> None:
        """Forget a conversation whose answer is finished or given up."""
        if (held := self._held.pop(_key(answer), None)) is not None:
            held[0].wait.end()
            held[1].cancel()

    def take_tool_seconds(self) -> float:
        """Return how long nothing was written for environments since it was asked last."""
        return 0.0 if self._environments is None else self._environments.tool_clock.take()

    def is_waiting(self, key: AnswerKey) -> bool:
        """Return True if the answer waits for its environment."""
        held = self._held.get(key)
        return held is not None and held[0].wait.is_on

    def _note_end(self, job: JobId, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.put_nowait((job, failure))


def _key(about: PromptIssued | TurnFinished | RolloutFinished | RolloutCut) -> AnswerKey:
    return about.step, about.purpose, about.prompt, about.member
