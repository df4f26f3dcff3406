"""Hold a conversation of the policy with an environment, which answers its turns."""

from typing import Any

from tlt.actors.worker.conversation import Conversation
from tlt.base.id_types import StopReason
from tlt.data.dataset import conversation, prompt_of
from tlt.environments import environment_messages as calls
from tlt.environments.environment import Message
from tlt.environments.environment_pool import EnvironmentFailed, EnvironmentProcess
from tlt.environments.tool_calls import MalformedCall, assistant_message
from tlt.protocol.rank_messages import (
    BeginTrajectory,
    ContinueTrajectory,
    EndTrajectory,
    TurnFinished,
)


class EnvironmentConversation(Conversation):
    async def talk(self, process: EnvironmentProcess) -> EndTrajectory:
        spec, prompt = self.environments.spec, self.prompt
        known = self.environments.prompt(prompt.purpose, prompt.prompt)
        opened = await process.call(calls.Reset(row=known.row, seed=self.seed))
        messages = opened.messages
        own = prompt_of(known, spec.data) if messages is None else messages
        said = _as_messages(conversation(own, spec.data))
        calls_tools = bool(opened.tools) or spec.data.tools_key is not None
        if opened.tools and not spec.data.chat_template:
            raise EnvironmentFailed("tools need data.chat_template: true")
        turn = await self.ask(
            BeginTrajectory(job=prompt.job, prompt=prompt, messages=messages, tools=opened.tools)
        )
        last: list[Message] = []
        stop: StopReason = "turns"
        for left in reversed(range(self.environments.section.max_turns)):
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
                turn = await self.ask(ContinueTrajectory(**self.about, messages=last))
                last = []
        counts = any(reward.kind == "environment" for reward in spec.rewards)
        judged = await process.call(calls.Judge(messages=said, stop=stop, counts=counts))
        return self.verdict(stop, last, judged.reward)


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
