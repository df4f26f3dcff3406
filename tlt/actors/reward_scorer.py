"""The reward scorer scores every finished rollout; one that cannot be scored gets the fallback."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from tlt.answer_files import AnswerFiles
from tlt.config import SessionSpec
from tlt.dataset import Prompts, prompts_file
from tlt.errors import BlobLost
from tlt.id_types import EntryId, JobId, Purpose
from tlt.json_logs import serve_run
from tlt.policies.job.overlong_penalty import overlong_penalty
from tlt.protocol.events import AnyEvent, RolloutFinished, RolloutScored
from tlt.protocol.shared_values import JobRecord
from tlt.rewards.reward_process_client import RewardSandbox
from tlt.rewards.reward_process_main import ScoreResult
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import CONNECTION_ERRORS, Connection, connect, retry_until_connected
from tlt.store.redis_keys import REWARD, Keys
from tlt.store.redis_stream import Consumer, Entry, Stream

_BATCH = 32
_BLOCK_MS = 500
_REREAD_SECONDS = 5.0
_events = Codec[AnyEvent](AnyEvent)
_log = structlog.get_logger("reward")


class JobScorer:
    """Score the answers of one job with its prompts and its sandboxed reward."""

    def __init__(self, record: JobRecord) -> None:
        self.job = record.job
        self._folder = Path(record.folder)
        self._answers = AnswerFiles(self._folder)
        self._sandbox = RewardSandbox(
            record.spec.reward, self._folder / "logs" / "reward-function.log"
        )
        self._prompts: dict[Purpose, Prompts] = {}
        self._reward = record.spec.reward
        self._most_tokens = record.spec.rollout.max_new_tokens

    async def score(self, rollout: RolloutFinished) -> RolloutScored:
        if rollout.purpose not in self._prompts:
            self._prompts[rollout.purpose] = Prompts(prompts_file(self._folder, rollout.purpose))
        prompt = self._prompts[rollout.purpose][rollout.prompt]
        try:
            answer = self._answers.read(rollout.answer)
        except BlobLost as error:
            verdict = ScoreResult(reward=self._reward.on_error, error=str(error))
        else:
            known = {
                "tokens": lambda: answer.tokens,
                "length": lambda: rollout.length,
                "stop": lambda: rollout.stop,
            }
            verdict = await self._sandbox.score(answer.text, prompt.answer, prompt.row, known)
        reward = verdict.reward
        if rollout.purpose == "train":
            reward -= overlong_penalty(self._reward, rollout.length, self._most_tokens)
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
            reward=reward,
            error=verdict.error,
        )

    def close(self) -> None:
        self._sandbox.stop()
        for prompts in self._prompts.values():
            prompts.close()


class RewardScorer:
    def __init__(self, session: SessionSpec) -> None:
        self.keys = Keys(session.name)
        self.connection: Connection = connect(session.redis_url)
        self.events = Stream(self.connection, self.keys.events, _events)
        self._scorer: JobScorer | None = None

    async def run(self) -> None:
        await retry_until_connected(lambda: self.events.ensure_group(REWARD))
        consumer = Consumer(self.events, REWARD, "reward")
        reread_at = 0.0
        while True:
            # An earlier scorer that ends late may have received entries under this name.
            if time.monotonic() - reread_at > _REREAD_SECONDS:
                consumer.reread_pending()
                reread_at = time.monotonic()
            try:
                entries = await consumer.read(_BATCH, _BLOCK_MS)
            except CONNECTION_ERRORS:
                await asyncio.sleep(0.2)
                continue
            # The coordinator can't read these either, and moves them to the dead letters.
            unreadable = [entry.id for entry in consumer.unreadable]
            consumer.unreadable.clear()
            if entries or unreadable:
                await self._score_batch(consumer, entries, unreadable)

    async def _score_batch(
        self,
        consumer: Consumer[AnyEvent],
        entries: Sequence[Entry[AnyEvent]],
        unreadable: Sequence[EntryId],
    ) -> None:
        scored: list[RolloutScored] = []
        for entry in entries:
            if isinstance(entry.message, RolloutFinished):
                scorer = await self._scorer_for(entry.message.job)
                if scorer is not None:
                    scored.append(await scorer.score(entry.message))
        ids = [*(entry.id for entry in entries), *unreadable]

        async def commit() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                for score in scored:
                    self.events.add(transaction, score)
                consumer.acknowledge(transaction, ids)
                await transaction.execute()

        await retry_until_connected(commit)
        consumer.forget(ids)

    async def _scorer_for(self, job: JobId) -> JobScorer | None:
        """Return the scorer of a running job; scores of an ended one are not needed."""
        raw = await retry_until_connected(lambda: self.connection.hget(self.keys.jobs, job))
        record = None if raw is None else msgspec.json.decode(raw, type=JobRecord)
        if record is None or record.status != "running":
            return None
        if self._scorer is None or self._scorer.job != job:
            if self._scorer is not None:
                self._scorer.close()
            serve_run(Path(record.folder))
            _log.info("scoring", job=job)
            self._scorer = JobScorer(record)
        return self._scorer
