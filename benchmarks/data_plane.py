"""Pass a large rollout batch of simulated workers through Redis and the real coordinator.

`python -m benchmarks.data_plane --out F.json [--answers 1024] [--tokens 4096] [--seconds 60]`

1,024 answers with a mean of 4,096 tokens end within a minute on 16 workers, which is faster than 16
GPUs would write them. The coordinator is the real one in a process of its own, and so is Redis.
Workers take prompts, write answers to files, report their decoding, follow each other's answers and
send what they have written so far while others idle. All of that is real except the tokens, which
are random. Counted are CPU seconds and memory of both processes, and bytes a token.
"""

import argparse
import asyncio
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.coordinator_process import coordinator_session, until
from benchmarks.result import at_most, write_result
from tlt.actors.worker.peer_answers import follow_peers
from tlt.base.id_types import Incarnation, JobId, WorkerId
from tlt.base.strategies import Draft
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.data.dataset import Prompt
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import (
    AnyEvent,
    DecodingReported,
    JobPrepared,
    JobSubmitted,
    RolloutFinished,
    RolloutScored,
    WorkerJoined,
)
from tlt.protocol.refs import AcceptedCounts, BatchSpan, DrafterSpan, PolicySpan
from tlt.protocol.shared_values import Prepared, StrategyTally, WorkerInfo
from tlt.spec.config import (
    AlgorithmSpec,
    DataSpec,
    DrafterSpec,
    JobSpec,
    PolicySpec,
    RewardSpec,
    RolloutSpec,
    SessionSpec,
    SpeculationSpec,
)
from tlt.store.message_codec import Codec
from tlt.store.redis_connection import Connection, connect
from tlt.store.redis_keys import ROLLOUT, Keys
from tlt.store.redis_stream import Consumer, Stream

_JOB = JobId("batch-1")
_WORKERS, _GROUP, _PROMPT_TOKENS = 16, 8, 256
_REPORT_SECONDS = 1.0
_events = Codec[AnyEvent](AnyEvent)
_prompts = Codec[PromptIssued](PromptIssued)
_TICKS = os.sysconf("SC_CLK_TCK")
_MEGABYTE = 1e6


class _Used(NamedTuple):
    cpu: float
    # the most that was resident, in bytes
    memory: int


def _used(pid: int) -> _Used:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return _Used((int(fields[11]) + int(fields[12])) / _TICKS, int(peak.split()[1]) * 1024)


def _spec(answers: int) -> JobSpec:
    return JobSpec(
        name="batch",
        policy=PolicySpec(path="policy", max_context=65_536),
        data=DataSpec(train="train.jsonl"),
        reward=RewardSpec(kind="final_answer"),
        algorithm=AlgorithmSpec(steps=2, prompts_per_step=answers // _GROUP, group_size=_GROUP),
        rollout=RolloutSpec(max_new_tokens=32_768, slots=answers // _WORKERS),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="off"),
    )


class _Worker:
    """Decodes the prompts that it takes, one token after the other, at one speed for all."""

    def __init__(
        self, connection: Connection, keys: Keys, number: int, run: Path, tokens: int, pace: float
    ) -> None:
        self.info = WorkerInfo(
            worker=WorkerId(f"w{number}"),
            incarnation=Incarnation(number + 1),
            ranks=1,
            host="host",
            rendezvous="127.0.0.1:1",
        )
        self.tokens = self.peer_answers = 0
        self._connection = connection
        self._events = Stream(connection, keys.events, _events)
        stream = Stream(connection, keys.prompts(_JOB), _prompts)
        self._queue = Consumer(stream, ROLLOUT, str(self.info.incarnation))
        self._answers = AnswerFiles(run).writer(f"{self.info.incarnation}.0")
        self._dice = random.Random(number)
        self._random = np.random.default_rng(number)
        self._mean = tokens
        # seconds a token
        self._pace = pace
        self._serial = 0

    async def follow(self) -> None:
        async for event in follow_peers(self._events, _WORKERS):
            self.peer_answers += isinstance(event, RolloutFinished)

    async def decode(self, slots: int) -> None:
        """Take a share of the prompts and write their answers; the shortest end first."""
        entries = await self._queue.read(slots, 20_000)
        while len(entries) < slots:
            entries += await self._queue.read(slots - len(entries), 1000)
        began, reported = time.monotonic(), 0.0
        # log-normal with that mean: most are short, a few very long
        lengths = [
            max(16, round(self._mean * self._dice.lognormvariate(-0.32, 0.8))) for _ in entries
        ]
        left = sorted(zip(lengths, entries, strict=True), key=lambda pair: pair[0])
        while left:
            now = time.monotonic() - began
            ended = [pair for pair in left if pair[0] * self._pace <= now]
            del left[: len(ended)]
            async with self._connection.pipeline(transaction=True) as transaction:
                for length, entry in ended:
                    self._finish(transaction, entry.message, length, len(left) + 1)
                if now - reported >= _REPORT_SECONDS:
                    reported = now
                    self._events.add(transaction, self._report(entries[0].message, len(left)))
                self._queue.acknowledge(transaction, [entry.id for _, entry in ended])
                await transaction.execute()
            await asyncio.sleep(0.05)

    def _finish(self, transaction: object, prompt: PromptIssued, length: int, rows: int) -> None:
        self.tokens += length
        steps = length // 3
        answer = self._answers.append(
            Answer(
                prompt=prompt.tokens,
                token_bytes=self._random.integers(150_000, size=length, dtype="<i4").tobytes(),
                logprob_bytes=(-self._random.random(length, dtype="<f4")).tobytes(),
                text="word " * (length * 4 // 5),
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                policies=(PolicySpan(version=0, tokens=length),),  # pyright: ignore
                drafters=(DrafterSpan(version=None, tokens=length),),
                origin_bytes=b"\1\1\2" * steps,
                batches=tuple(BatchSpan(size=64 - n, tokens=length // 64) for n in range(64)),
            )
        )
        common = {name: getattr(prompt, name) for name in ("job", "epoch", "step", "attempt")}
        common |= {name: getattr(prompt, name) for name in ("purpose", "prompt", "member")}
        finished = RolloutFinished(
            **common,
            worker=self.info.worker,
            incarnation=self.info.incarnation,
            answer=answer,
            length=length,
            accepted=(AcceptedCounts(drafter=None, steps=(steps, steps // 2, steps // 4)),),
            batch=rows,
            decode_seconds=length * self._pace,
            stop="stop",
        )
        self._events.add(transaction, finished)  # pyright: ignore
        scored = RolloutScored(**common, length=length, reward=float(self._dice.random() < 0.5))
        self._events.add(transaction, scored)  # pyright: ignore

    def _report(self, prompt: PromptIssued, rows: int) -> DecodingReported:
        self._serial += 1
        steps = round(_REPORT_SECONDS / self._pace / 3)
        tally = StrategyTally(
            strategy=Draft(depth=4),
            bucket=64,
            drafter=None,
            control=None,
            steps=steps,
            explored=1,
            rows=rows * steps,
            tokens=3 * rows * steps,
            seconds=_REPORT_SECONDS,
            work=_REPORT_SECONDS,
            overhead=0.01,
            expected=3.0 * rows * steps,
        )
        return DecodingReported(
            job=_JOB,
            worker=self.info.worker,
            incarnation=self.info.incarnation,
            rank=0,
            serial=self._serial,
            step=prompt.step,
            purpose="train",
            tallies=(tally,),
        )


async def _await_updates(connection: Connection, keys: Keys, workers: Sequence[_Worker]) -> None:
    """Wait until the coordinator has sent every worker its part of the policy update."""

    async def is_sent(key: str) -> bool:
        entries = await connection.xrange(key)
        return any(b"UpdatePolicy" in field for _, fields in entries for field in fields.values())

    for worker in workers:
        key = keys.commands(worker.info.worker, worker.info.incarnation)
        await until(lambda key=key: is_sent(key))


async def _run(spec: SessionSpec, run: Path, answers: int, tokens: int, seconds: float) -> int:
    connection, keys = connect(spec.redis_url), Keys(spec.name)
    # the longest of so many answers is about ten times the mean
    pace = seconds / (10 * tokens)
    workers = [_Worker(connection, keys, n, run, tokens, pace) for n in range(_WORKERS)]
    events = Stream(connection, keys.events, _events)
    begin: list[AnyEvent] = [
        JobSubmitted(job=_JOB, spec=_spec(answers), folder=str(run)),
        *(WorkerJoined(info=worker.info) for worker in workers),
        JobPrepared(job=_JOB, prepared=Prepared(train_prompts=answers // _GROUP, eval_prompts=0)),
    ]
    async with connection:
        followers = [asyncio.ensure_future(worker.follow()) for worker in workers]
        async with connection.pipeline(transaction=True) as transaction:
            for event in begin:
                events.add(transaction, event)
            await transaction.execute()
        await until(lambda: connection.exists(keys.prompts(_JOB)))
        await asyncio.gather(*(worker.decode(answers // _WORKERS) for worker in workers))
        await _await_updates(connection, keys, workers)
        for follower in followers:
            follower.cancel()
    missed = _WORKERS * answers - sum(worker.peer_answers for worker in workers)
    assert missed == 0, f"{missed} answers didn't reach a worker"
    return sum(worker.tokens for worker in workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096, help="mean of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the longest answers")
    arguments = parser.parse_args()
    began = time.monotonic()
    prompts = [
        Prompt(tokens=tuple(range(_PROMPT_TOKENS)), answer="7", row={})
        for _ in range(arguments.answers // _GROUP)
    ]
    with coordinator_session("data-plane", prompts) as (spec, run, redis, processes):
        pids = processes["coordinator"], processes["redis"]
        before, started = [_used(pid) for pid in pids], time.monotonic()
        tokens = asyncio.run(
            _run(spec, run, arguments.answers, arguments.tokens, arguments.seconds)
        )
        elapsed = time.monotonic() - started
        after = [_used(pid) for pid in pids]
        journal = (run / "journal.jsonl").stat().st_size
        files = sum(file.stat().st_size for file in (run / "answers").iterdir())
        written = sum(file.stat().st_size for file in redis.data.rglob("*") if file.is_file())
    cpu = [(b.cpu - a.cpu) / elapsed for a, b in zip(before, after, strict=True)]
    memory = [used.memory / _MEGABYTE for used in after]
    claims = [
        at_most("data_plane.core_share", math.fsum(cpu), "of a core", 0.3),
        at_most("data_plane.memory", math.fsum(memory), "MB", 500),
        at_most("data_plane.journal", journal / tokens, "bytes a token", 1),
    ]
    details = {
        "answers": arguments.answers,
        "workers": _WORKERS,
        "tokens": tokens,
        "elapsed": round(elapsed, 1),
        "core_share": {"coordinator": round(cpu[0], 3), "redis": round(cpu[1], 3)},
        "megabytes": {"coordinator": round(memory[0]), "redis": round(memory[1])},
        "bytes_a_token": {
            "journal": round(journal / tokens, 3),
            "answer files": round(files / tokens, 2),
            "append-only file of Redis": round(written / tokens, 3),
        },
    }
    print(details)
    write_result("data_plane", claims, details, time.monotonic() - began, arguments.out)


if __name__ == "__main__":
    main()
