"""Let ranks of the test's own process converse with real environments, without Redis."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.ranks.members import decoding_of
from tests.ranks.ranks import INCARNATION, WORKER, LocalRank, local_rank, open_job, with_policy
from tests.samples import JOB
from tlt.actors.worker.conversations import Conversations
from tlt.actors.worker.worker_context import IncarnationSetup
from tlt.base.id_types import Attempt, Epoch, Member, PromptIndex, Step
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.data.dataset import Prompt, Prompts, prompts_file
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import AnyEvent, RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import ToRank, TurnFinished
from tlt.spec.config import JobSpec, RolloutSpec
from tlt.spec.environment import EnvironmentSpec
from tlt.spec.reward import RewardSpec

CODE = """
import os, random, time
from pathlib import Path


class Game:
    '''Answers with digits that depend on the seed and on what the policy said.'''

    def reset(self, row, seed):
        self.row, self.turns = row, 0
        self.random = random.Random(f"{seed}")
        if row.get("broken"):
            raise RuntimeError("no world")
        if "opening" in row:
            return [{"role": "user", "content": row["opening"]}], []

    def step(self, message):
        self.turns += 1
        mark = self.row.get("killed")
        if mark and self.turns == 2 and not Path(mark).exists():
            Path(mark).touch()
            os._exit(3)
        if self.row.get("fails_at") == self.turns:
            raise KeyError("x")
        if self.row.get("dies_at") == self.turns:
            os._exit(3)
        while (gate := self.row.get("gate")) and not Path(gate).exists():
            time.sleep(0.005)
        said = f"{len(message['content']) % 10}{self.random.randrange(10)}+"
        return [{"role": "user", "content": said}], self.turns == self.row["turns"]

    def reward(self, trajectory):
        return self.turns + {"stop": 0.0, "turns": 0.25, "length": 0.5}[trajectory["stop"]]
"""
# a random policy writes one of these soon
STOPS = ["0", "1", "2", "3", "4"]


class _InProcess:
    """A rank as its worker sees it."""

    def __init__(self, local: LocalRank) -> None:
        self.local = local
        self.told: list[ToRank] = []

    def send(self, message: ToRank) -> None:
        self.told.append(message)
        self.local.rank.handle(message)


class Posted(list[AnyEvent]):
    def post(self, event: AnyEvent) -> None:
        self.append(event)


class Conversing:
    def __init__(self, folder: Path, ranks: Sequence[_InProcess]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.changed = asyncio.Event()
        self.events = Posted()
        self.turns: list[TurnFinished] = []
        self.finished: dict[tuple[int, int], RolloutFinished] = {}
        self.cut: list[RolloutCut] = []
        setup: Any = IncarnationSetup(
            connection=None,  # pyright: ignore[reportArgumentType]
            keys=None,  # pyright: ignore[reportArgumentType]
            worker=WORKER,
            incarnation=INCARNATION,
        )
        self.conversations = Conversations(setup, self.events, self.changed)  # type: ignore

    def begin(self, prompts: Sequence[PromptIssued]) -> None:
        """Spread the prompts over the ranks."""
        for index, prompt in enumerate(prompts):
            rank: Any = self.ranks[index % len(self.ranks)]
            self.conversations.begin(rank, prompt)

    async def advance(self) -> None:
        """Let each rank make a decode step, and pass on what it has sent."""
        for rank in self.ranks:
            if decoding_of(rank.local.rank).engine.running:
                rank.local.rank.compute()
            for message in rank.local.sent():
                if isinstance(message, TurnFinished):
                    self.turns.append(message)
                    self.conversations.note_turn(message)
                elif isinstance(message, RolloutFinished):
                    self.conversations.end(message)
                    self.finished[message.prompt, message.member] = message
                elif isinstance(message, RolloutCut):
                    self.conversations.end(message)
                    self.cut.append(message)
        await asyncio.sleep(0.001)

    async def until_finished(self, count: int) -> dict[tuple[int, int], Answer]:
        async with asyncio.timeout(60):
            while len(self.finished) < count:
                await self.advance()
        files = AnswerFiles(self.folder)
        return {key: files.read(event.answer) for key, event in self.finished.items()}


def environment_spec(folder: Path, **changes: Any) -> JobSpec:
    """Return a job of a tiny policy that plays the game; `changes` are those of the environment."""
    file = folder / "game.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(CODE)
    return with_policy(
        folder,
        rollout=RolloutSpec(max_new_tokens=200, slots=2, stop=STOPS),
        reward=RewardSpec(kind="environment"),
        environment=EnvironmentSpec(factory=f"{file}:Game", **changes),
    )


def prompts(spec: JobSpec, folder: Path, rows: Sequence[dict[str, Any]]) -> list[PromptIssued]:
    """Write the rows' prompts into the run's folder, and return two answers to write to each."""
    tokens = [(2, 5, 6 + index % 8) for index in range(len(rows))]
    Prompts.write(
        prompts_file(folder, "train"),
        (
            Prompt(tokens=each, row={"prompt": "12+", **row})
            for each, row in zip(tokens, rows, strict=True)
        ),
    )
    return [
        PromptIssued(
            job=JOB,
            epoch=Epoch(1),
            step=Step(0),
            attempt=Attempt(0),
            purpose="train",
            prompt=PromptIndex(index),
            member=Member(member),
            tokens=each,
        )
        for index, each in enumerate(tokens)
        for member in range(2)
    ]


@asynccontextmanager
async def conversing(folder: Path, spec: JobSpec, ranks: int = 1) -> AsyncIterator[Conversing]:
    """Open the job in so many ranks."""
    async with AsyncExitStack() as stack:
        opened: list[_InProcess] = []
        for index in range(ranks):
            local = stack.enter_context(local_rank(folder, index))
            local.rank.handle(open_job(folder, spec))
            opened.append(_InProcess(local))
        found = Conversing(folder, opened)
        found.conversations.open(open_job(folder, spec))
        try:
            yield found
        finally:
            found.conversations.close()
