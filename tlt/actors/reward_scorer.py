"""The reward's shell: every finished rollout is scored; what cannot be scored gets the fallback."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import structlog

from tlt.config import SessionSpec
from tlt.dataset import Prompts, prompts_file
from tlt.ids import EntryId, JobId, Purpose
from tlt.json_logs import serve_run
from tlt.protocol.events import AnyEvent, RolloutFinished, RolloutScored
from tlt.protocol.records import JobRecord
from tlt.rewards.sandbox import RewardSandbox
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import GONE, Connection, connect, persistently
from tlt.store.redis_keys import REWARD, Keys
from tlt.store.redis_stream import Consumer, Entry, Stream

_BATCH = 32
_BLOCK_MS = 500
_LOOK_BACK_SECONDS = 5.0
_events = Codec[AnyEvent](AnyEvent)
_log = structlog.get_logger("reward")


class Bench:
    """What scoring one job needs."""

    def __init__(self, record: JobRecord, logs: Path) -> None:
        self.record = record
        self.judge = RewardSandbox(record.spec.reward, logs / "reward-function.log")
        self._prompts: dict[Purpose, Prompts] = {}

    def prompts(self, purpose: Purpose) -> Prompts:
        if purpose not in self._prompts:
            self._prompts[purpose] = Prompts(prompts_file(Path(self.record.folder), purpose))
        return self._prompts[purpose]

    def close(self) -> None:
        self.judge.stop()
        for prompts in self._prompts.values():
            prompts.close()


class Reward:
    def __init__(self, session: SessionSpec) -> None:
        self.session = session
        self.keys = Keys(session.name)
        self.connection: Connection = connect(session.redis_url)
        self.events = Stream(self.connection, self.keys.events, _events)
        self._bench: Bench | None = None

    async def run(self) -> None:
        await persistently(lambda: self.events.ensure_group(REWARD), asyncio.sleep)
        consumer = Consumer(self.events, REWARD, "reward")
        looked_back = 0.0
        while True:
            # A predecessor that takes long to die may have been given entries under our name.
            if time.monotonic() - looked_back > _LOOK_BACK_SECONDS:
                consumer.look_back()
                looked_back = time.monotonic()
            try:
                entries = await consumer.read(_BATCH, _BLOCK_MS)
            except GONE:
                await asyncio.sleep(0.2)
                continue
            # The coordinator cannot read them either, and buries them.
            unread = [entry.id for entry in consumer.undecodable]
            consumer.undecodable.clear()
            if entries or unread:
                await self._score_batch(consumer, entries, unread)

    async def _score_batch(
        self,
        consumer: Consumer[AnyEvent],
        entries: Sequence[Entry[AnyEvent]],
        unread: Sequence[EntryId],
    ) -> None:
        rollouts = [e.message for e in entries if isinstance(e.message, RolloutFinished)]
        scored = [score for r in rollouts if (score := await self._score(r)) is not None]
        ids = [*(entry.id for entry in entries), *unread]

        async def commit() -> None:
            async with self.connection.pipeline(transaction=True) as transaction:
                for score in scored:
                    self.events.add(transaction, score)
                consumer.acknowledge(transaction, ids)
                await transaction.execute()

        await persistently(commit, asyncio.sleep)
        consumer.forget(ids)

    async def _score(self, rollout: RolloutFinished) -> RolloutScored | None:
        bench = await self._bench_for(rollout.job)
        if bench is None:
            return None
        prompt = bench.prompts(rollout.purpose)[rollout.prompt]
        verdict = await bench.judge.score(rollout.text, prompt.answer, prompt.row)
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
            reward=verdict.reward,
            error=verdict.error,
        )

    async def _bench_for(self, job: JobId) -> Bench | None:
        """None for a job that has ended: nobody waits for its scores."""
        raw = await persistently(lambda: self.connection.hget(self.keys.jobs, job), asyncio.sleep)
        record = None if raw is None else msgspec.json.decode(raw, type=JobRecord)
        if record is None or record.status != "running":
            return None
        if self._bench is not None and self._bench.record.job == job:
            return self._bench
        if self._bench is not None:
            self._bench.close()
        serve_run(Path(record.folder))
        _log.info("scores", job=job)
        self._bench = Bench(record, Path(record.folder) / "logs")
        return self._bench
