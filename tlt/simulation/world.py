"""Simulated workers that decode, on a clock that jumps from one event to the next.

A worker has slots and takes answers from a queue, in order. While its rows stay the same they
advance together, so the time of the next end is known at once. A scheduler says which queue a
worker takes answers from, and what its seconds are used for.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tlt.simulation.answer_groups import Answer
from tlt.simulation.engine_speed import EngineSpeed, Pace

# what a worker's second is used for: to decode the batch that the next update waits for, answers
# that a later update gets, or answers that are decoded again; to train the drafter, or the policy
Use = Literal["batch", "ahead", "discarded", "drafter", "update", "unused"]
USES: tuple[Use, ...] = ("batch", "ahead", "discarded", "drafter", "update", "unused")
_STILL = Pace(1.0, 1.0)


@dataclass(eq=False, slots=True)
class Worker:
    number: int
    queue: deque[Answer]
    # where each running answer ends, as a position that all rows advance together
    rows: list[tuple[float, int, Answer]] = field(default_factory=list)
    position: float = 0.0
    # tokens of all rows in the cache
    cached: float = 0.0
    # seconds that a row has had, if all rows share the worker evenly
    clock: float = 0.0
    # when the rows advance from `position`: in the future while prompts are read
    at: float = 0.0
    pace: Pace = _STILL
    use: Use = "unused"
    since: float = 0.0
    # of its next event; earlier ones don't count
    serial: int = 0


class Finished(NamedTuple):
    worker: Worker
    answer: Answer


class Drained(NamedTuple):
    """The queue is empty and so are all slots."""

    worker: Worker


class Alarm(NamedTuple):
    """The time that a scheduler asked for has come."""


Happening = Finished | Drained | Alarm


class World:
    def __init__(self, workers: int, slots: int, speed: EngineSpeed) -> None:
        self.now = 0.0
        self.workers = [Worker(number, deque()) for number in range(workers)]
        self.slots = slots
        # answers that ended, and worker seconds by use
        self.ended = 0
        self.seconds: dict[Use, float] = dict.fromkeys(USES, 0.0)
        self._speed = speed
        # time, serial and the worker; none for an alarm
        self._events: list[tuple[float, int, Worker | None]] = []
        self._serial = 0

    def next(self) -> Happening:
        """Advance the clock to the next happening."""
        while True:
            at, serial, worker = heapq.heappop(self._events)
            if worker is None or worker.serial == serial:
                self.now = at
                if worker is None:
                    return Alarm()
                return self._finish_row(worker) if worker.rows else Drained(worker)

    # --- what a scheduler orders

    def assign(self, worker: Worker, queue: deque[Answer], share: int, use: Use = "batch") -> None:
        """Let a worker without rows decode a queue, at first no more than its share."""
        worker.queue, worker.at = queue, self.now
        self.use(worker, use)
        self._fill(worker, min(share, self.slots))
        self._plan(worker)

    def use(self, worker: Worker, use: Use) -> None:
        """Say what a worker's seconds are used for from now on."""
        self.seconds[worker.use] += self.now - worker.since
        worker.use, worker.since = use, self.now

    def pause(self, worker: Worker) -> None:
        """Stop decoding between two ends of rows."""
        if rows := len(worker.rows):
            # prompts may still be read
            seconds = max(0.0, self.now - worker.at)
            tokens = self._speed.tokens(worker.pace, rows, worker.cached, seconds)
            self._move(worker, min(tokens, worker.rows[0][0] - worker.position))
        worker.serial = 0

    def cut(self, worker: Worker) -> list[Answer]:
        """Take a worker's unfinished answers, which keep the tokens that they have."""
        self.pause(worker)
        for end, _, answer in worker.rows:
            answer.done = answer.length - max(1, round(end - worker.position))
            answer.seconds += max(0.0, worker.clock - answer.began)
        answers = [answer for _, _, answer in worker.rows]
        worker.rows.clear()
        worker.cached = 0.0
        self.use(worker, "unused")
        return answers

    def recharge(self, answer: Answer, use: Use) -> None:
        """Charge an answer's seconds to another use, because the update doesn't get it."""
        self.seconds["batch"] -= answer.seconds
        self.seconds[use] += answer.seconds
        answer.seconds = 0.0

    def alarm(self, seconds: float) -> None:
        self._push(self.now + seconds, None)

    # --- decoding

    def _push(self, at: float, worker: Worker | None) -> None:
        self._serial += 1
        if worker is not None:
            worker.serial = self._serial
        heapq.heappush(self._events, (at, self._serial, worker))

    def _fill(self, worker: Worker, slots: int) -> None:
        """Take answers from the queue until so many run."""
        while worker.queue and len(worker.rows) < slots:
            answer = worker.queue.popleft()
            known = self._speed.prompt_tokens + answer.done
            self._read(worker, known)
            worker.cached += known
            answer.began = worker.clock
            self._serial += 1
            end = worker.position + answer.length - answer.done
            heapq.heappush(worker.rows, (end, self._serial, answer))

    def _read(self, worker: Worker, tokens: float) -> None:
        seconds = self._speed.prefill(tokens)
        worker.at += seconds
        worker.clock += seconds / max(1, len(worker.rows))

    def _plan(self, worker: Worker) -> None:
        """Find out when the next row ends; a worker without any is drained now."""
        rows = len(worker.rows)
        if rows == 0:
            self._push(self.now, worker)
            return
        worker.pace = self._speed.pace(rows, worker.cached)
        tokens = worker.rows[0][0] - worker.position
        seconds = self._speed.seconds(worker.pace, rows, worker.cached, tokens)
        self._push(worker.at + seconds, worker)

    def _move(self, worker: Worker, tokens: float) -> None:
        """Move the rows of a worker to the present."""
        worker.position += tokens
        worker.cached += tokens * len(worker.rows)
        worker.clock += (self.now - worker.at) / len(worker.rows)
        worker.at = self.now

    def _finish_row(self, worker: Worker) -> Finished:
        self._move(worker, worker.rows[0][0] - worker.position)
        _, _, answer = heapq.heappop(worker.rows)
        worker.cached -= self._speed.prompt_tokens + answer.length
        answer.done = answer.length
        answer.seconds += worker.clock - answer.began
        self.ended += 1
        self._fill(worker, self.slots)
        self._plan(worker)
        return Finished(worker, answer)
