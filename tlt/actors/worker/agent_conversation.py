"""Hold the conversations of the policy with an agent, which asks for turns at the endpoint.

A request that goes on from a conversation continues it; any other begins a branch, another
conversation of the same answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tlt.actors.worker.conversation import Conversation
from tlt.actors.worker.job_environments import JobEnvironments
from tlt.actors.worker.rank_process import RankProcess
from tlt.base.id_types import StopReason
from tlt.environments.environment import Message, Tool
from tlt.environments.environment_messages import RunAgent
from tlt.environments.environment_pool import EnvironmentFailed, EnvironmentProcess
from tlt.environments.openai_protocol import Asked, Refused, Written, said
from tlt.protocol.commands import PromptIssued
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    EndTrajectory,
    TurnFinished,
)


@dataclass
class _Branch:
    """A conversation as the agent knows it."""

    # none until the first turn is written
    tokens: list[int]
    # None: the agent has asked in tokens
    messages: list[Message] | None
    tools: list[Tool] | None

    def new_part(self, asked: Asked) -> "_NewPart | None":
        """Return what a request adds to it; None if it doesn't go on from here."""
        if not self.tokens:
            return None
        if asked.tokens is not None:
            known = len(self.tokens)
            goes_on = len(asked.tokens) > known and list(asked.tokens[:known]) == self.tokens
            return _NewPart([], asked.tokens[known:], known) if goes_on else None
        if self.messages is None or asked.messages is None or asked.tools != self.tools:
            return None
        known = len(self.messages)
        goes_on = len(asked.messages) > known and asked.messages[:known] == self.messages
        return _NewPart(asked.messages[known:], None, known) if goes_on else None


@dataclass(frozen=True)
class _NewPart:
    messages: list[Message]
    tokens: tuple[int, ...] | None
    # length of what it follows
    known: int


class AgentConversation(Conversation):
    def __init__(
        self, rank: RankProcess, prompt: PromptIssued, environments: JobEnvironments
    ) -> None:
        super().__init__(rank, prompt, environments)
        self._process: EnvironmentProcess | None = None
        self._branches: list[_Branch] = []
        # requests, and those that got a turn
        self._asked = self._turns = 0
        self._stop: StopReason = "stop"
        self._met_limit = False
        self._shares_client = environments.section.kind == "verifiers"
        # the rank writes one turn of an answer at a time
        self._lock = asyncio.Lock()

    async def talk(self, process: EnvironmentProcess) -> EndTrajectory:
        known = self.environments.prompt(self.prompt.purpose, self.prompt.prompt)
        endpoint = self.environments.endpoint
        self._branches, self._stop, self._met_limit = [], "stop", False
        self._asked = self._turns = 0
        token = endpoint.admit(self)
        self._process = process
        try:
            ran = await process.call(
                RunAgent(
                    row=known.row,
                    seed=self.seed,
                    socket=endpoint.path,
                    token=token,
                    shared_key=endpoint.shared_key if self._shares_client else "",
                    counts=any(r.kind == "environment" for r in self.environments.spec.rewards),
                )
            )
            reward, metrics = ran.reward, ran.metrics
        except EnvironmentFailed:
            if not self._met_limit:
                raise
            reward, metrics = 0.0, {}  # it gave up there
        finally:
            endpoint.dismiss(token)
            self._process = None
        if not self._turns:
            raise EnvironmentFailed("the agent has got no turn")
        return self.verdict(self._stop, reward=reward, metrics=metrics)

    async def write(self, asked: Asked, is_gone: Callable[[], Awaitable[bool]]) -> Written:
        """Let the rank write the turn that a request of the agent's asks for, or raise Refused."""
        if asked.tools and not self.environments.spec.data.chat_template:
            raise Refused("tools need data.chat_template: true")
        process = self._process
        async with self._lock:
            # it may have ended, and begun anew, meanwhile
            if process is None or process is not self._process:
                raise Refused("the answer is over", 503, "over")
            if await is_gone():
                raise Refused("nobody waits for the turn", 499, "gone")
            # refused ones count, so that an agent that asks again and again ends
            if self._asked >= self.environments.section.max_turns:
                self._stop, self._met_limit = "turns", True
                raise Refused("the answer has had its last turn", code="max_turns")
            self._asked += 1
            process.stop_clock()
            try:
                return await self._write(asked)
            except asyncio.CancelledError as error:
                raise Refused("the answer is over", 503, "over") from error
            finally:
                if process is self._process:
                    process.start_clock()

    async def _write(self, asked: Asked) -> Written:
        index, part = self._longest(asked)
        if part is None:
            index = len(self._branches)
            turning = self.ask(
                BeginTrajectory(
                    job=self.prompt.job,
                    prompt=self.prompt,
                    branch=index,
                    messages=asked.messages or [],
                    tools=asked.tools or [],
                    tokens=asked.tokens,
                    most_tokens=asked.most_tokens,
                )
            )
            self._branches.append(_Branch([], None, asked.tools))
        else:
            turning = self.ask(
                ContinueTrajectory(
                    **self.about,
                    branch=index,
                    messages=part.messages,
                    tokens=part.tokens,
                    most_tokens=asked.most_tokens,
                )
            )
        return self._written(self._branches[index], asked, await turning)

    def _longest(self, asked: Asked) -> tuple[int, _NewPart | None]:
        """Return the conversation that a request goes on from, and what it adds."""
        parts = [(b.new_part(asked), index) for index, b in enumerate(self._branches)]
        found = [(part.known, index, part) for part, index in parts if part is not None]
        return max(found, key=lambda each: each[0])[1:] if found else (0, None)

    def _written(self, branch: _Branch, asked: Asked, turn: TurnFinished) -> Written:
        if turn.error is not None:
            raise Refused(turn.error)
        is_cut = turn.stop == "length"
        if not turn.tokens:
            self._stop, self._met_limit = "length", True
            raise Refused("there is no room for another turn", code="context_length_exceeded")
        is_last = is_cut and len(turn.tokens) != asked.most_tokens
        self._stop = "length" if is_last else "stop"
        written = Written(
            number=self._turns,
            text=turn.text,
            in_thought=turn.in_thought,
            prompt_tokens=[*branch.tokens, *turn.added],
            tokens=turn.tokens,
            logprobs=turn.logprobs,
            is_cut=is_cut,
        )
        self._turns += 1
        branch.tokens += [*turn.added, *turn.tokens]
        branch.messages = None
        if asked.messages is not None:
            branch.messages = [*asked.messages, said(written, asked.tools)]
        return written
