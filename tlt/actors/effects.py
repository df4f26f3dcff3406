"""What commands do to the store: all that one batch of events caused is one transaction."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tlt.dataset import Prompts
from tlt.ids import Attempt, JobId, Member, Purpose
from tlt.protocol.commands import (
    Command,
    FinishRun,
    ForgetRollouts,
    IssuePrompts,
    KeepRollout,
    PromptIssued,
    RecordStatus,
    RequeuePrompts,
    ToWorker,
    WorkerCommand,
)
from tlt.protocol.events import AnyEvent, RolloutDropped, RolloutFinished
from tlt.protocol.records import JobRecord
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection, Transaction
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Stream
from tlt.store.requeue import requeue

_commands = Codec[WorkerCommand](WorkerCommand)
_prompts = Codec[PromptIssued](PromptIssued)
_encode = msgspec.msgpack.Encoder().encode


class Caused(NamedTuple):
    command: Command
    event: AnyEvent
    by_session: bool


class Effects:
    def __init__(self, connection: Connection, keys: Keys, events: Stream[AnyEvent]) -> None:
        self._connection = connection
        self._keys = keys
        self._events = events
        self.records: dict[JobId, JobRecord] = {}
        self.prompts: dict[Purpose, Prompts] = {}
        self.max_tries = 1

    def prompt_stream(self, job: JobId) -> Stream[PromptIssued]:
        return Stream(self._connection, self._keys.prompts(job), _prompts)

    async def fill(self, transaction: Transaction, caused: Sequence[Caused]) -> None:
        for command, event, _ in caused:
            match command:
                case ToWorker():
                    key = self._keys.commands(command.worker, command.incarnation)
                    transaction.xadd(key, _commands.encode(command))  # pyright: ignore[reportArgumentType]
                case IssuePrompts():
                    self._issue(transaction, command)
                case RequeuePrompts():
                    await self._requeue(transaction, command)
                case KeepRollout() if isinstance(event, RolloutFinished):
                    transaction.hset(
                        self._keys.rollouts(command.job, command.step),
                        f"{command.prompt}.{command.member}",
                        _encode(event),
                    )
                case ForgetRollouts():
                    for step in command.steps:
                        transaction.delete(self._keys.rollouts(command.job, step))
                case RecordStatus():
                    self._record(transaction, command)
                case FinishRun():
                    await self._clear(transaction, command.job)
                case _:
                    pass  # it has no effect on the store

    def _issue(self, transaction: Transaction, command: IssuePrompts) -> None:
        """Ordered by group: siblings mostly land together and share their prompt's prefill."""
        stream = self.prompt_stream(command.job)
        for index in command.prompts:
            prompt = self.prompts[command.purpose][index]
            for member in range(command.members):
                stream.add(
                    transaction,
                    PromptIssued(
                        job=command.job,
                        epoch=command.epoch,
                        step=command.step,
                        attempt=Attempt(0),
                        purpose=command.purpose,
                        prompt=index,
                        member=Member(member),
                        tokens=prompt.tokens,
                    ),
                )

    async def _requeue(self, transaction: Transaction, command: RequeuePrompts) -> None:
        given_up = await requeue(
            self.prompt_stream(command.job),
            transaction,
            group=ROLLOUT,
            dead=str(command.incarnation),
            max_tries=self.max_tries,
            dead_letters=self._keys.dead_letters,
        )
        for prompt in given_up:
            dropped = RolloutDropped(
                job=prompt.job,
                epoch=prompt.epoch,
                step=prompt.step,
                attempt=prompt.attempt,
                purpose=prompt.purpose,
                prompt=prompt.prompt,
                member=prompt.member,
                reason=f"its worker was lost {self.max_tries} times",
            )
            self._events.add(transaction, dropped)

    def _record(self, transaction: Transaction, command: RecordStatus) -> None:
        before = self.records[command.job]
        after = msgspec.structs.replace(before, status=command.status, error=command.error)
        self.records[command.job] = after
        transaction.hset(self._keys.jobs, command.job, msgspec.json.encode(after))

    async def _clear(self, transaction: Transaction, job: JobId) -> None:
        for pattern in self._keys.of_job(job):
            async for key in self._connection.scan_iter(match=pattern, count=1000):
                transaction.delete(key)
