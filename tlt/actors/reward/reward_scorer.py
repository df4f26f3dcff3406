"""The reward scorer scores finished rollouts, many at once; one that fails harms no other."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tlt.actors.run_until_one_fails import run_until_one_fails
from tlt.base.id_types import LARGEST, EntryId, JobId, Purpose
from tlt.base.json_logs import serve_runs
from tlt.blobs.answer_files import AnswerFiles
from tlt.data.dataset import Prompt, Prompts, conversation, prompt_of, prompts_file
from tlt.errors import BlobLost
from tlt.policies.algorithm.advantages import overlong_penalty
from tlt.protocol.events import AnyEvent, RolloutFinished, RolloutScored
from tlt.protocol.shared_values import JobRecord
from tlt.rewards.process.weighted_rewards import Verdict, WeightedRewards
from tlt.spec.config import SessionSpec
from tlt.spec.prompt_files import names_in_rows
from tlt.store.heartbeats import send_service_heartbeats
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, connect, retry_until_connected
from tlt.store.redis_keys import REWARD, Keys
from tlt.store.redis_stream import Consumer, Entry, Stream

_BATCH = 256
_BLOCK_MS = 500
_REREAD_SECONDS = 5.0
# answers that wait in this process
_MOST_WAITING = 4096
_events = Codec[AnyEvent](AnyEvent)
_log = structlog.get_logger("reward")


class JobScorer:
    """Score the answers of one job with its prompts and its rewards."""

    def __init__(self, record: JobRecord, workers: int = 8, device: str = "cpu") -> None:
        """`device` is where reward models compute whose spec names none."""
        self.job = record.job
        self.folder = Path(record.folder)
        self._answers = AnswerFiles(self.folder)
        log = self.folder / "logs" / "reward-function.log"
        rewards = [reward.on_device(device) for reward in record.spec.rewards]
        self._rewards = WeightedRewards(rewards, log, workers)
        self._asks_environment = any(each.kind == "environment" for each in rewards)
        self._data = record.spec.data
        self._prompts: dict[Purpose, Prompts] = {}
        self._algorithm = record.spec.algorithm
        self._most_tokens = record.spec.rollout.max_new_tokens

    async def score(self, rollout: RolloutFinished) -> RolloutScored:
        penalty = 0.0
        try:
            prompt = self._prompt(rollout)
            answer = self._answers.read(rollout.answer)
            if answer.error is not None and not self._asks_environment:
                raise LookupError(answer.error)
        except (BlobLost, LookupError, OSError) as error:
            verdict, source, measured = Verdict(error=str(error)), None, {}
        else:
            penalty, measured = self._penalty(rollout, prompt), answer.metrics
            source = prompt.sources[-1] if names_in_rows(self._data) and prompt.sources else None
            known = {
                "tokens": lambda: answer.tokens,
                "length": lambda: rollout.length,
                "stop": lambda: rollout.stop,
                "in_thought": lambda: prompt.in_thought,
                "environment": lambda: (answer.reward, answer.error),
                "prompt": lambda: conversation(prompt_of(prompt, self._data), self._data),
            }
            try:
                verdict = await self._rewards.score(
                    answer.text,
                    prompt.answer,
                    prompt.row,
                    known,
                    extract=rollout.purpose == "eval",
                    sources=prompt.sources,
                )
            except Exception as error:  # the entry would come back to the next process, again
                _log.exception("an answer can't be scored", job=rollout.job)
                verdict = Verdict(error=f"{type(error).__name__}: {error}")
        reward = verdict.reward
        if reward is not None and not abs(reward) + abs(penalty) <= LARGEST:
            reward, verdict = None, Verdict(error=f"the reward is {reward}")
        if verdict.error is not None:
            _log.warning("not scored", job=rollout.job, prompt=rollout.prompt, error=verdict.error)
        return RolloutScored(
            job=rollout.job,
            epoch=rollout.epoch,
            step=rollout.step,
            attempt=rollout.attempt,
            purpose=rollout.purpose,
            prompt=rollout.prompt,
            member=rollout.member,
            length=rollout.length,
            reward=None if reward is None else reward - penalty,
            error=verdict.error,
            parts=verdict.parts,
            final=verdict.final,
            correct=verdict.correct,
            unpenalised=reward if penalty else None,
            source=source,
            measured=measured,
        )

    def _penalty(self, rollout: RolloutFinished, prompt: Prompt) -> float:
        """Return what a training answer loses by its length; its limit may be the context's end."""
        if rollout.purpose != "train":
            return 0.0
        limit = min(self._most_tokens, prompt.room or self._most_tokens)
        return overlong_penalty(self._algorithm, rollout.length, limit)

    def _prompt(self, rollout: RolloutFinished) -> Prompt:
        """Raise OSError or LookupError where the job has no such prompt."""
        purpose, index = rollout.purpose, rollout.prompt
        if purpose not in self._prompts:
            self._prompts[purpose] = Prompts(prompts_file(self.folder, purpose))
        if index not in range(len(self._prompts[purpose])):
            raise LookupError(f"the job has no prompt {index} of its {purpose} data")
        return self._prompts[purpose][index]

    async def close(self) -> None:
        await self._rewards.stop()
        for prompts in self._prompts.values():
            prompts.close()


class _Scoring(NamedTuple):
    job: JobId
    task: "asyncio.Task[RolloutScored]"


class RewardScorer:
    def __init__(self, session: SessionSpec) -> None:
        self.keys = Keys(session.name)
        self.connection: Connection = connect(session.redis_url)
        self.events = Stream(self.connection, self.keys.events, _events)
        self._session = session
        # of running jobs, and of paused ones while answers of theirs are being scored
        self._scorers: dict[JobId, JobScorer] = {}
        # answers being scored, by the entry that asked for it
        self._scoring: dict[EntryId, _Scoring] = {}
        self._scored = asyncio.Event()

    async def run(self) -> None:
        every_seconds = self._session.heartbeat_seconds
        try:
            await run_until_one_fails(
                self._score_answers(),
                send_service_heartbeats(self.connection, self.keys, REWARD, every_seconds),
            )
        finally:
            for job in list(self._scorers):
                await self._give_up(job)

    async def _score_answers(self) -> None:
        await retry_until_connected(lambda: self.events.ensure_group(REWARD))
        consumer = Consumer(self.events, REWARD, "reward")
        reading: asyncio.Task[list[Entry[AnyEvent]]] | None = None
        scored = asyncio.create_task(self._scored.wait())
        reread_at = 0.0
        while True:
            # An earlier scorer that ends late may have received entries under this name.
            if reading is None and time.monotonic() - reread_at > _REREAD_SECONDS:
                consumer.reread_pending()
                reread_at = time.monotonic()
                # another job's events may never let a read find nothing
                await self._close_scorers()
            if reading is None and len(self._scoring) < _MOST_WAITING:
                reading = asyncio.create_task(_read(consumer))
            tasks = [scored] if reading is None else [scored, reading]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reading is not None and reading.done():
                entries, reading = reading.result(), None
                # The coordinator can't read these either, and moves them to the dead letters.
                unreadable = [entry.id for entry in consumer.unreadable]
                consumer.unreadable.clear()
                await self._accept(consumer, entries, unreadable)
            if scored.done():
                self._scored.clear()
                scored = asyncio.create_task(self._scored.wait())
                await self._commit_scored(consumer)

    async def _accept(
        self,
        consumer: Consumer[AnyEvent],
        entries: Sequence[Entry[AnyEvent]],
        unreadable: Sequence[EntryId],
    ) -> None:
        """Begin to score answers; all else has been read, and that is all."""
        passed = list(unreadable)
        for entry in entries:
            scorer = None
            if isinstance(entry.message, RolloutFinished):
                scorer = await self._scorer_for(entry.message.job)
            if scorer is None or not isinstance(entry.message, RolloutFinished):
                passed.append(entry.id)
            else:
                task = asyncio.create_task(scorer.score(entry.message))
                task.add_done_callback(lambda _: self._scored.set())
                self._scoring[entry.id] = _Scoring(scorer.job, task)
        await self._commit(consumer, passed, [])
        if not entries:
            await self._close_scorers()

    async def _commit_scored(self, consumer: Consumer[AnyEvent]) -> None:
        """Report what has been scored, in the order of the answers."""
        done = {id_: each.task for id_, each in self._scoring.items() if each.task.done()}
        for id_ in done:
            del self._scoring[id_]
        # scores of a job that has ended were given up
        scored = [task.result() for task in done.values() if not task.cancelled()]
        await self._commit(consumer, list(done), scored)

    async def _commit(
        self,
        consumer: Consumer[AnyEvent],
        ids: Sequence[EntryId],
        scored: Sequence[RolloutScored],
    ) -> None:
        if not ids:
            return

        async def commit() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                for score in scored:
                    self.events.add(transaction, score)
                consumer.acknowledge(transaction, ids)
                await transaction.execute()

        await retry_until_connected(commit)
        consumer.forget(ids)

    async def _scorer_for(self, job: JobId) -> JobScorer | None:
        """Return the scorer of a job that has not ended; scores of others are not needed."""
        record = await self._record(job)
        if record is None or record.status in ENDED_STATUSES:
            await self._give_up(job)
            return None
        if job not in self._scorers:
            scorer = JobScorer(record, self._session.reward_workers, self._session.device)
            self._scorers[job] = scorer
            serve_runs([each.folder for each in self._scorers.values()])
            _log.info("scoring", job=job)
        return self._scorers[job]

    async def _record(self, job: JobId) -> JobRecord | None:
        raw = await retry_until_connected(lambda: self.connection.hget(self.keys.jobs, job))
        return None if raw is None else msgspec.json.decode(raw, type=JobRecord)

    async def _close_scorers(self) -> None:
        """Free the processes of jobs that don't run, once nothing of theirs is being scored."""
        for job in list(self._scorers):
            record = await self._record(job)
            if record is None or record.status in ENDED_STATUSES:
                await self._give_up(job)
            elif record.status != "running" and not self._tasks(job):
                await self._scorers.pop(job).close()

    def _tasks(self, job: JobId) -> list["asyncio.Task[RolloutScored]"]:
        return [each.task for each in self._scoring.values() if each.job == job]

    async def _give_up(self, job: JobId) -> None:
        """End the scoring of a job that has ended."""
        for task in self._tasks(job):
            task.cancel()
        if (scorer := self._scorers.pop(job, None)) is not None:
            await scorer.close()


async def _read(consumer: Consumer[AnyEvent]) -> list[Entry[AnyEvent]]:
    try:
        return await consumer.read(_BATCH, _BLOCK_MS)
    except CONNECTION_ERRORS:
        await asyncio.sleep(0.2)
        return []
