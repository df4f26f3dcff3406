"""Hold one conversation: a rank writes the policy's turns, an environment answers them."""

import asyncio
from typing import Any, TypedDict

import structlog

from tlt.actors.worker.job_environments import JobEnvironments
from tlt.actors.worker.rank_process import RankProcess
from tlt.base.id_types import JobId, Member, PromptIndex, Purpose, Step, StopReason
from tlt.data.dataset import conversation, prompt_of
from tlt.environments import environment_messages as calls
from tlt.environments.environment import Message
from tlt.environments.environment_pool import (
    EnvironmentEnded,
    EnvironmentFailed,
    EnvironmentProcess,
)
from tlt.environments.tool_calls import MalformedCall, assistant_message
from tlt.errors import ConfigError, RankError
from tlt.policies.keyed_random import mix
from tlt.protocol.commands import PromptIssued
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    EndTrajectory,
    TurnFinished,
)
from tlt.spec.config import JobSpec

# a process that ends twice in one answer ends because of it
_MOST_TRIES = 2
# what is common in libraries of random numbers
_MOST_SEED = (1 << 32) - 1
_log = structlog.get_logger("worker")


class _About(TypedDict):
    job: JobId
    step: Step
    purpose: Purpose
    prompt: PromptIndex
    member: Member


class Conversation:
    """An answer that a rank writes in turns."""

    def __init__(
        self, rank: RankProcess, prompt: PromptIssued, environments: JobEnvironments
    ) -> None:
        # for the environment
        self.is_waiting = True
        self._rank = rank
        self._prompt = prompt
        self._environments = environments
        self._has_begun = False
        self._turn: asyncio.Future[TurnFinished] | None = None

    def note_turn(self, turn: TurnFinished) -> None:
        """Go on after a turn of the policy."""
        if self._turn is not None and not self._turn.done():
            self.is_waiting = True
            self._turn.set_result(turn)

    async def hold(self) -> None:
        """Hold it to its end; if somebody else ends the environment's process, begin anew."""
        error = ""
        for _ in range(_MOST_TRIES):
            try:
                verdict = await self._hold()
            except EnvironmentEnded as ended:
                error = str(ended)
                self._environments.pool.discard_idle()
            except EnvironmentFailed as failed:
                error = str(failed)
                break
            except (ConfigError, RankError):
                raise
            except Exception as unexpected:  # nothing that is said ends the worker
                _log.exception("a conversation failed", prompt=self._prompt.prompt)
                error = f"{type(unexpected).__name__}: {unexpected}"
                break
            else:
                self._rank.send(verdict)
                return
        _log.warning("an environment failed", prompt=self._prompt.prompt, error=error)
        if not self._has_begun:
            begin = BeginTrajectory(job=self._prompt.job, prompt=self._prompt, error=error)
            await self._ask(begin)
        self._rank.send(self._verdict("stop", error=error))

    async def _hold(self) -> EndTrajectory:
        process = await self._environments.pool.take()
        try:
            return await self._talk(process)
        finally:
            self._environments.pool.put_back(process)

    async def _talk(self, process: EnvironmentProcess) -> EndTrajectory:
        spec, prompt = self._environments.spec, self._prompt
        known = self._environments.prompt(prompt.purpose, prompt.prompt)
        opened = await process.call(calls.Reset(row=known.row, seed=_seed(spec, prompt)))
        messages = opened.messages
        own = prompt_of(known, spec.data) if messages is None else messages
        said = _as_messages(conversation(own, spec.data))
        calls_tools = bool(opened.tools) or spec.data.tools_key is not None
        if opened.tools and not spec.data.chat_template:
            raise EnvironmentFailed("tools need data.chat_template: true")
        turn = await self._ask(
            BeginTrajectory(job=prompt.job, prompt=prompt, messages=messages, tools=opened.tools)
        )
        last: list[Message] = []
        stop: StopReason = "turns"
        for left in reversed(range(self._environments.section.max_turns)):
            if turn.error is not None:
                raise EnvironmentFailed(turn.error)
            if turn.stop == "length":
                if turn.text:
                    said.append({"role": "assistant", "content": turn.text})
                stop = "length"
                break
            observed = await _step(process, turn, said, calls_tools)
            last = observed.messages or []
            said += last
            if observed.done:
                stop = "stop"
                break
            if left:
                turn = await self._ask(ContinueTrajectory(**self._about, messages=last))
                last = []
        counts = any(reward.kind == "environment" for reward in spec.rewards)
        judged = await process.call(calls.Judge(messages=said, stop=stop, counts=counts))
        return self._verdict(stop, last, judged.reward)

    async def _ask(self, message: BeginTrajectory | ContinueTrajectory) -> TurnFinished:
        """Let the rank write a turn, and return it."""
        self._turn = asyncio.get_running_loop().create_future()
        self._rank.send(message)
        self.is_waiting, self._has_begun = False, True
        return await self._turn

    def _verdict(
        self,
        stop: StopReason,
        last: list[Message] | None = None,
        reward: float | None = None,
        error: str | None = None,
    ) -> EndTrajectory:
        return EndTrajectory(
            **self._about, messages=last or [], stop=stop, reward=reward, error=error
        )

    @property
    def _about(self) -> _About:
        prompt = self._prompt
        return _About(
            job=prompt.job,
            step=prompt.step,
            purpose=prompt.purpose,
            prompt=prompt.prompt,
            member=prompt.member,
        )


async def _step(
    process: EnvironmentProcess, turn: TurnFinished, said: list[Message], calls_tools: bool
) -> calls.Observation:
    """Let the environment answer a turn; a call that can't be read is answered with an error."""
    message: Message = {"role": "assistant", "content": turn.text}
    said.append(message)
    if calls_tools:
        try:
            said[-1] = message = assistant_message(turn.text, turn.in_thought)
        except MalformedCall as error:
            return calls.Observation(messages=[{"role": "tool", "content": f"error: {error}"}])
    return await process.call(calls.Step(message=message))


def _as_messages(said: Any) -> list[Message]:
    """Return a plain prompt as a message of the user's."""
    return list(said) if isinstance(said, list) else [{"role": "user", "content": str(said)}]


def _seed(spec: JobSpec, prompt: PromptIssued) -> int:
    """Return the same seed for all answers to a prompt, and in all evaluations."""
    trains = prompt.purpose == "train"
    return mix(spec.seed, prompt.step if trains else 0, trains, prompt.prompt) & _MOST_SEED
