"""The effects of commands on Redis: all effects of one batch of events are one transaction."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from tlt.base.id_types import Attempt, JobId, Member, Purpose, Step
from tlt.data.dataset import Prompts, prompts_file
from tlt.errors import StoreError
from tlt.protocol.commands import (
    Command,
    EndJob,
    IssuePrompts,
    PromptIssued,
    RecordStatus,
    RequeuePrompts,
    ResumeAnswers,
    ToWorker,
    WorkerCommand,
)
from tlt.protocol.events import AnyEvent, RolloutDropped, RolloutFinished, WorkerLost
from tlt.protocol.shared_values import JobRecord
from tlt.spec.config import JobSpec
from tlt.store.journal import START, Position
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection, Transaction, retry_until_connected
from tlt.store.redis_keys import ROLLOUT, Keys, prompt_queues, queue_of
from tlt.store.redis_stream import Stream, add_dead_letter

_events = Codec[AnyEvent](AnyEvent)
_commands = Codec[WorkerCommand](WorkerCommand)
_prompts = Codec[PromptIssued](PromptIssued)


class Caused(NamedTuple):
    command: Command
    event: AnyEvent
    # the job whose run decided; None: the session
    run: JobId | None


class Effects:
    def __init__(self, connection: Connection, keys: Keys) -> None:
        self.connection = connection
        self.keys = keys
        self.events = Stream(connection, keys.events, _events)
        self.records: dict[JobId, JobRecord] = {}
        # of the runs that are open
        self.prompts: dict[JobId, dict[Purpose, Prompts]] = {}
        self._max_tries: dict[JobId, int] = {}
        self._staleness: dict[JobId, int] = {}

    async def load_records(self) -> None:
        records = await self.connection.hgetall(self.keys.jobs)
        self.records = {
            JobId(job.decode()): msgspec.json.decode(raw, type=JobRecord)
            for job, raw in records.items()
        }

    async def committed(self, decider: str) -> Position:
        """Return how far the journal of a decider is committed."""
        raw = await self.connection.hget(self.keys.committed, decider)
        return START if raw is None else msgspec.json.decode(raw, type=Position)

    async def open_run(self, job: JobId, spec: JobSpec, folder: Path) -> None:
        """Open the prompts of a job that starts or resumes, and its streams."""
        self._max_tries[job] = spec.rollout.max_tries
        self._staleness[job] = spec.algorithm.staleness
        prompts = self.prompts[job] = {"train": Prompts(prompts_file(folder, "train"))}
        if spec.data.eval is not None:
            prompts["eval"] = Prompts(prompts_file(folder, "eval"))
        for stream in self.prompt_streams(job):
            await retry_until_connected(partial(stream.ensure_group, ROLLOUT))

    def close_run(self, job: JobId) -> None:
        for prompts in self.prompts.pop(job, {}).values():
            prompts.close()

    async def post(self, event: AnyEvent) -> None:
        """Append an event of the coordinator's own to the stream."""

        async def add() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                self.events.add(transaction, event)
                await transaction.execute()

        await retry_until_connected(add)

    def prompt_streams(self, job: JobId) -> list[Stream[PromptIssued]]:
        keys = (self.keys.prompts(job, each) for each in prompt_queues(self._staleness.get(job, 0)))
        return [Stream(self.connection, key, _prompts) for key in keys]

    async def fill(self, transaction: Transaction, caused: Sequence[Caused]) -> None:
        for command, event, _ in caused:
            match command:
                case ToWorker():
                    key = self.keys.commands(command.worker, command.incarnation)
                    transaction.xadd(key, _commands.encode(command))  # pyright: ignore[reportArgumentType]
                case IssuePrompts():
                    self._issue(transaction, command)
                case ResumeAnswers():
                    self._resume(transaction, command)
                case RequeuePrompts():
                    lost_with_session = isinstance(event, WorkerLost) and event.with_session
                    excused = command.excused or lost_with_session
                    await self._requeue(transaction, command, excused)
                case RecordStatus():
                    self._record(transaction, command)
                case EndJob():
                    transaction.delete(*self.keys.of_job(command.job))
                case _:
                    pass  # these change nothing in Redis

    def _issue(self, transaction: Transaction, command: IssuePrompts) -> None:
        """Add prompts ordered by group, so that siblings mostly share a rank and a prefill."""
        stream = _stream_of(self.prompt_streams(command.job), command.purpose, command.step)
        for index, count in zip(command.prompts, command.counts, strict=True):
            prompt = self.prompts[command.job][command.purpose][index]
            for member in range(count):
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
                        set=prompt.set,
                    ),
                )

    def _resume(self, transaction: Transaction, command: ResumeAnswers) -> None:
        streams, prompts = self.prompt_streams(command.job), self.prompts[command.job]["train"]
        for each in command.answers:
            _stream_of(streams, "train", each.step).add(
                transaction,
                PromptIssued(
                    job=command.job,
                    epoch=command.epoch,
                    step=each.step,
                    attempt=each.attempt,
                    purpose="train",
                    prompt=each.prompt,
                    member=each.member,
                    tokens=prompts[each.prompt].tokens,
                    excused=each.excused,
                    prefix=each.prefix,
                ),
            )

    async def _requeue(
        self, transaction: Transaction, command: RequeuePrompts, excused: bool
    ) -> None:
        """Return prompts of a lost incarnation to the end of their queue, or to the dead letters.

        An excused loss is no try: the prompt can't have caused it.
        """
        max_tries, dead_letters = self._max_tries[command.job], self.keys.dead_letters
        pending = [
            (stream, *each)
            for stream in self.prompt_streams(command.job)
            for each in await stream.pending(ROLLOUT, str(command.incarnation))
        ]
        for stream, entry_id, fields in pending:
            try:
                prompt = stream.codec.decode(fields)
            except StoreError as error:
                add_dead_letter(transaction, dead_letters, stream.key, fields, str(error))
            else:
                again = msgspec.structs.replace(
                    prompt, attempt=Attempt(prompt.attempt + 1), excused=prompt.excused + excused
                )
                if again.attempt - again.excused < max_tries:
                    stream.add(transaction, again)
                else:
                    reason = f"its worker was lost {max_tries} times"
                    add_dead_letter(transaction, dead_letters, stream.key, fields, reason)
                    self.events.add(transaction, drop(prompt, reason))
            stream.acknowledge(transaction, ROLLOUT, [entry_id])

    def _record(self, transaction: Transaction, command: RecordStatus) -> None:
        before = self.records[command.job]
        after = msgspec.structs.replace(
            before, status=command.status, error=command.error, pause=command.pause
        )
        self.records[command.job] = after
        transaction.hset(self.keys.jobs, command.job, msgspec.json.encode(after))


def _stream_of(
    streams: Sequence[Stream[PromptIssued]], purpose: Purpose, step: Step
) -> Stream[PromptIssued]:
    return streams[queue_of(len(streams) > 1, purpose, step)]


def drop(lost: PromptIssued | RolloutFinished, reason: str) -> RolloutDropped:
    return RolloutDropped(
        job=lost.job,
        epoch=lost.epoch,
        step=lost.step,
        attempt=lost.attempt,
        purpose=lost.purpose,
        prompt=lost.prompt,
        member=lost.member,
        reason=reason,
    )
