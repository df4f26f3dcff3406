"""Workers that decode and learn at a GPU's speed, on a fast clock, for a real coordinator.

Rows of a worker advance together, as in `tlt.simulation`; what a row has when it is cut is known
to all workers, in place of the answer's file.
"""

import asyncio
import contextlib
import heapq
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scaling_world import ANSWER, SimulatedWorker, World, place
from tlt.base.id_types import Member, PromptIndex, Step
from tlt.blobs.answer_files import AnswerFiles
from tlt.protocol.commands import (
    CutAnswers,
    PromptIssued,
    StartRollout,
    UpdatePolicy,
    WorkerCommand,
)
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.simulation.engine_speed import EngineSpeed
from tlt.simulation.job import Job


class Row(NamedTuple):
    # the position of all rows at which it ends
    end: float
    serial: int
    prompt: PromptIssued
    length: int


class PacedWorld(World):
    def __init__(self, job: Job, speed: float, redis_url: str, session: str, run: Path) -> None:
        super().__init__(redis_url, session, AnswerFiles(run))
        self.job = job
        self.speed = speed
        # simulated seconds until the last update
        self.seconds = 0.0
        self.engine_speed = EngineSpeed(
            job.inputs.engine, job.inputs.drafts if job.mode.speculates else ()
        )
        # by prompt; and the tokens of answers that were cut
        self._lengths: dict[PromptIndex, list[int]] = {}
        self.done: dict[tuple[PromptIndex, Member], int] = {}
        self._groups = job.groups()
        self._began: float | None = None

    def new_worker(self, number: int) -> SimulatedWorker:
        return PacedWorker(self, number)

    @property
    def now(self) -> float:
        """Return the simulated seconds since the first prompt."""
        if self._began is None:
            self._began = time.monotonic()
        return self.speed * (time.monotonic() - self._began)

    async def sleep_until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.now) / self.speed)

    def length(self, prompt: PromptIssued) -> int:
        """Return the length of an answer; groups are drawn in the order of the queue."""
        if prompt.prompt not in self._lengths:
            drawn = next(self._groups)
            self._lengths[prompt.prompt] = [answer.length for answer in drawn.answers]
        return self._lengths[prompt.prompt][prompt.member]


class _Engine:
    def __init__(self, speed: EngineSpeed) -> None:
        self._speed = speed
        self._rows: list[Row] = []
        self._position = self._cached = 0.0
        # when the rows advance from their position: in the future while prompts are read
        self._at = 0.0
        self._serial = 0

    def add(self, prompt: PromptIssued, length: int, done: int, now: float) -> None:
        self._advance(now)
        known = self._speed.prompt_tokens + done
        self._at += self._speed.prefill(known)
        self._cached += known
        self._serial += 1
        heapq.heappush(
            self._rows, Row(self._position + length - done, self._serial, prompt, length)
        )

    def next_end(self) -> float | None:
        """Return when the next row ends."""
        if not self._rows:
            return None
        pace = self._speed.pace(len(self._rows), self._cached)
        tokens = self._rows[0].end - self._position
        return self._at + self._speed.seconds(pace, len(self._rows), self._cached, tokens)

    def finish(self, at: float) -> Row:
        """End the row that ends at this time."""
        self._move(self._rows[0].end - self._position)
        self._at = at
        row = heapq.heappop(self._rows)
        self._cached -= self._speed.prompt_tokens + row.length
        return row

    def cut(self, now: float) -> list[tuple[PromptIssued, int]]:
        """Return all rows' prompts, and how many tokens their answers have."""
        self._advance(now)
        cut = [
            (row.prompt, max(0, row.length - max(1, round(row.end - self._position))))
            for row in self._rows
        ]
        self._rows.clear()
        self._cached = 0.0
        return cut

    def _advance(self, now: float) -> None:
        rows = len(self._rows)
        if rows and now > self._at:
            pace = self._speed.pace(rows, self._cached)
            tokens = self._speed.tokens(pace, rows, self._cached, now - self._at)
            self._move(min(tokens, self._rows[0].end - self._position))
        self._at = max(self._at, now)

    def _move(self, tokens: float) -> None:
        self._position += tokens
        self._cached += tokens * len(self._rows)


class PacedWorker(SimulatedWorker):
    def __init__(self, world: PacedWorld, number: int) -> None:
        super().__init__(world, number)
        self._paced = world
        self._engine = _Engine(world.engine_speed)
        # the step whose prompts it answers; None from a cut until the next rollout
        self._step: Step | None = None

    def _obey(self, command: WorkerCommand) -> None:
        match command:
            case StartRollout():
                self._step = command.step
                super()._obey(command)
            case CutAnswers():
                self._step = None
                self._intake.stop()
                for prompt, done in self._engine.cut(self._paced.now):
                    self._cut(prompt, done)
                self._rank.filled.set()
            case UpdatePolicy():
                self._intake.stop()
                self._paced.start(self._learn(command))
            case _:
                super()._obey(command)

    async def _learn(self, command: UpdatePolicy) -> None:
        world = self._paced
        tokens = sum(share.total_tokens for share in command.minibatches)
        seconds = world.job.inputs.update.seconds_of(tokens, world.job.workers)
        await world.sleep_until(world.now + seconds)
        if command.first_rank == 0:
            world.seconds = world.now
        self._update(command)

    async def _decode(self) -> None:
        world, rank, engine = self._paced, self._rank, self._engine
        while True:
            while rank.prompts:
                self._take(rank.prompts.popleft())
            rank.filled.clear()
            end = engine.next_end()
            left = None if end is None else max(0.0, end - world.now) / world.speed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await rank.filled.wait()
            # an answer that was cut meanwhile has no end
            if end is not None and end == engine.next_end() and end <= world.now:
                self._finish_row(engine.finish(end))

    def _take(self, prompt: PromptIssued) -> None:
        world = self._paced
        length = world.length(prompt)
        key = prompt.prompt, prompt.member
        done = 0 if prompt.prefix is None else world.done.get(key, 0)
        # where two steps are open, each has weights of its own
        apart = world.job.mode.ahead and prompt.step != self._step
        if self._step is not None and not apart:
            self._engine.add(prompt, length, done, world.now)
        else:
            self._cut(prompt, done)

    def _finish_row(self, row: Row) -> None:
        event = RolloutFinished(
            **place(row.prompt),
            **self._identity,
            answer=self._answers.append(ANSWER),
            length=row.length,
            accepted=(),
            batch=1,
            decode_seconds=1.0,
            stop="stop",
        )
        taken = self._intake.finish(event)
        assert taken is not None, "the worker has the prompt"
        self._outbox.post(event, taken)

    def _cut(self, prompt: PromptIssued, done: int) -> None:
        keeps = done > 0 and not self._paced.job.mode.defer_long
        self._paced.done[prompt.prompt, prompt.member] = done if keeps else 0
        event = RolloutCut(
            **place(prompt),
            **self._identity,
            answer=self._answers.append(ANSWER) if keeps else None,
            decode_seconds=0.0,
            excused=prompt.excused,
        )
        if (taken := self._intake.finish(event)) is not None:
            self._outbox.post(event, taken)

    @property
    def _identity(self) -> dict[str, Any]:
        return {"worker": self.info.worker, "incarnation": self.info.incarnation}
