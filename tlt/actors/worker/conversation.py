"""Hold one conversation: a rank writes the policy's turns, code of the user's says what follows."""

import asyncio
from abc import ABC, abstractmethod
from typing import TypedDict

import structlog

from tlt.actors.worker.job_environments import JobEnvironments
from tlt.actors.worker.rank_process import RankProcess
from tlt.actors.worker.tool_clock import Wait
from tlt.base.id_types import JobId, Member, PromptIndex, Purpose, Step, StopReason
from tlt.environments.environment import Message
from tlt.environments.environment_pool import (
    EnvironmentEnded,
    EnvironmentFailed,
    EnvironmentProcess,
)
from tlt.errors import ConfigError, RankError
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import PromptIssued
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    EndTrajectory,
    TurnFinished,
)

# a process that ends twice in one answer ends because of it
_MOST_TRIES = 2
# what is common in libraries of random numbers
_MOST_SEED = (1 << 32) - 1
_log = structlog.get_logger("worker")


class About(TypedDict):
    job: JobId
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member


class Conversation(ABC):
    """An answer that a rank writes in turns."""

    def __init__(
        self, rank: RankProcess, prompt: PromptIssued, environments: JobEnvironments
    ) -> None:
        self.prompt = prompt
        self.environments = environments
        # for the user's code
        self.wait = Wait(environments.tool_clock)
        self._rank = rank
        self._has_begun = False
        self._turn: asyncio.Future[TurnFinished] | None = None

    def note_turn(self, turn: TurnFinished) -> None:
        """Go on after a turn of the policy."""
        if self._turn is not None and not self._turn.done():
            self.wait.switch(True)
            self._turn.set_result(turn)

    async def hold(self) -> None:
        """Hold it to its end; if somebody else ends the environment's process, begin anew."""
        try:
            await self._hold()
        finally:
            if self._turn is not None:
                self._turn.cancel()

    @abstractmethod
    async def talk(self, process: EnvironmentProcess) -> EndTrajectory:
        """Talk to the end with code that runs in this process; begin anew when called again."""

    def ask(self, message: BeginTrajectory | ContinueTrajectory) -> asyncio.Future[TurnFinished]:
        """Let the rank write a turn; the future has it when it is finished."""
        self._rank.send(message)
        self._turn = asyncio.get_running_loop().create_future()
        self.wait.switch(False)
        self._has_begun = True
        return self._turn

    def verdict(
        self,
        stop: StopReason,
        last: list[Message] | None = None,
        reward: float | None = None,
        error: str | None = None,
        metrics: dict[str, float] | None = None,
    ) -> EndTrajectory:
        return EndTrajectory(
            **self.about,
            messages=last or [],
            stop=stop,
            reward=reward,
            error=error,
            metrics=metrics or {},
        )

    @property
    def about(self) -> About:
        prompt = self.prompt
        return About(
            job=prompt.job,
            step=prompt.step,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
        )

    @property
    def seed(self) -> int:
        """Return the same seed for all answers to a prompt, and in all evaluations."""
        prompt, spec = self.prompt, self.environments.spec
        trains = prompt.purpose == "train"
        return mix(spec.seed, prompt.step if trains else 0, trains, prompt.prompt) & _MOST_SEED

    async def _hold(self) -> None:
        error = ""
        for _ in range(_MOST_TRIES):
            try:
                verdict = await self._try()
            except EnvironmentEnded as ended:
                error = str(ended)
                _log.warning("an answer's process ended", prompt=self.prompt.prompt, error=error)
                self.environments.pool.discard_idle()
            except EnvironmentFailed as failed:
                error = str(failed)
                break
            except (ConfigError, RankError):
                raise
            except Exception as unexpected:  # nothing that is said ends the worker
                _log.exception("a conversation failed", prompt=self.prompt.prompt)
                error = f"{type(unexpected).__name__}: {unexpected}"
                break
            else:
                await self._end(verdict)
                return
        _log.warning("an environment failed", prompt=self.prompt.prompt, error=error)
        if not self._has_begun:
            begin = BeginTrajectory(job=self.prompt.job, prompt=self.prompt, error=error)
            await self.ask(begin)
        await self._end(self.verdict("stop", error=error))

    async def _try(self) -> EndTrajectory:
        await self._settle()
        process = await self.environments.pool.take()
        try:
            return await self.talk(process)
        finally:
            self.environments.pool.put_back(process)

    async def _end(self, verdict: EndTrajectory) -> None:
        await self._settle()
        self._rank.send(verdict)

    async def _settle(self) -> None:
        """Wait for a turn that nobody reads: an agent may end while one is written."""
        if self._turn is not None and not self._turn.done():
            await asyncio.wait([self._turn])
