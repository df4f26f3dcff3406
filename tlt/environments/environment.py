"""The protocol of an environment: what a user's class has."""

from typing import Any, TypeAlias

# `role` and `content`, as chat templates have them, and perhaps `tool_calls`
Message: TypeAlias = dict[str, Any]
# the JSON schema of a function, as chat templates take it
Tool: TypeAlias = dict[str, Any]
Opening: TypeAlias = tuple[list[Message], list[Tool]]


class Environment:
    """Answers the policy's messages; an object of it lives as long as one answer.

    Its methods may be async or not.
    """

    async def reset(self, row: dict[str, Any], seed: int) -> Opening | None:
        """Return the messages that the policy sees first, and its tools.

        None: the row's own prompt, and no tools. Answers to one prompt get the same seed.
        """
        return None

    async def step(self, message: Message) -> tuple[list[Message], bool]:
        """Return what the policy sees next, and True if the answer is done.

        The message has the policy's text in `content`, and its calls of tools in `tool_calls`:
        `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
        """
        raise NotImplementedError

    async def reward(self, trajectory: dict[str, Any]) -> float | None:
        """Return the answer's reward, or None to leave the answer out.

        `messages` of the trajectory are all of both sides; `stop` is "stop" (it is done), "turns"
        (the policy had as many as it may) or "length" (it had no room for more tokens).
        """
        raise NotImplementedError
