"""Run environments in processes that may be killed, one after the other in each of them."""

import asyncio
import inspect
import os
from collections.abc import Callable
from typing import Any

import msgspec

from tlt.base.own_functions import load_own_function
from tlt.environments.agent_calls import AgentCalls, run_command
from tlt.environments.environment import Message
from tlt.environments.environment_messages import AnyRequest, Judge, Observation, Reset, Step
from tlt.environments.own_folder import empty_folder
from tlt.environments.reward_value import reward_of
from tlt.environments.verifiers_calls import VerifiersCalls
from tlt.isolation.error_text import describe
from tlt.isolation.fork_server import LoadedCode, Reply, serve
from tlt.spec.environment import EnvironmentSpec

_requests = msgspec.json.Decoder(AnyRequest)


class EnvironmentCalls:
    """Calls the methods of an environment; what its code raises is an observation."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._environment: Any = None
        # of this process: where it is when the first request comes, before the user's code runs
        self._folder: str | None = None
        # one loop for all calls of an answer, so that an environment may keep a client
        self._runner: asyncio.Runner | None = None

    def answer(self, body: bytes) -> Reply:
        request = _requests.decode(body)
        ends = isinstance(request, Judge)
        try:
            if self._folder is None:
                self._folder = os.getcwd()
            if isinstance(request, Reset):
                empty_folder(self._folder)
            observation = self._call(request)
            # the worker and its rank exchange MessagePack
            msgspec.msgpack.encode(observation)
        except Exception as error:  # raised by the user's code, or by what it returned
            observation = Observation(error=describe(error, "environment"))
        if ends:
            self._forget()
        return Reply(observation, ends_others=ends)

    def _call(self, request: AnyRequest) -> Observation:
        match request:
            case Reset():
                self._environment = self._factory()
                opened = self._wait_for(self._environment.reset(request.row, request.seed))
                if opened is None:
                    return Observation()
                messages, tools = opened
                return Observation(messages=_checked(messages, "reset"), tools=list(tools or []))
            case Step():
                messages, done = self._wait_for(self._environment.step(request.message))
                return Observation(messages=_checked(messages, "step"), done=bool(done))
            case Judge(counts=False):
                return Observation()
            case Judge():
                trajectory = {"messages": request.messages, "stop": request.stop}
                return reward_of(self._wait_for(self._environment.reward(trajectory)))

    def _forget(self) -> None:
        """End what the environment still waits for: the next answer has another one."""
        self._environment = None
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _wait_for(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())


def _checked(messages: Any, method: str) -> list[Message]:
    """Raise ValueError for what no chat template can render."""
    found = list(messages or [])
    for message in found:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{method} gave a message without a role: {message!r}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{method} gave a message whose content is no text: {message!r}")
    return found


def _load(section: msgspec.Raw) -> LoadedCode:
    spec = msgspec.json.decode(section, type=EnvironmentSpec)
    if spec.kind == "verifiers":
        return LoadedCode(VerifiersCalls(spec).answer)
    if spec.command:
        return LoadedCode(AgentCalls(run_command(spec.command)).answer)
    assert spec.factory is not None
    function = load_own_function("environment.factory", spec.factory)
    calls = AgentCalls(function) if spec.is_agent else EnvironmentCalls(function)
    return LoadedCode(calls.answer)


if __name__ == "__main__":
    serve(_load)
