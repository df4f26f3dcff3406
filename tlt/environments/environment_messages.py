"""Define what a worker and the processes of environments exchange."""

from typing import Any, TypeAlias

import msgspec

from tlt.environments.environment import Message, Tool


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a method of an environment."""


class Reset(Request, frozen=True, kw_only=True):
    """Make a new environment; the one before is gone."""

    row: dict[str, Any]
    seed: int


class Step(Request, frozen=True, kw_only=True):
    message: Message


class Judge(Request, frozen=True, kw_only=True):
    """Ask for the reward if it counts, and end what the environment has started."""

    messages: list[Message]
    stop: str
    counts: bool


class RunAgent(Request, frozen=True, kw_only=True):
    """Run an agent to its end; it asks for turns at an address of its own."""

    row: dict[str, Any]
    seed: int
    # the worker's endpoint, and what opens this answer there
    socket: str
    token: str
    # the key of a client that names the token as its model, and serves several answers
    shared_key: str = ""
    # False: its reward isn't asked for
    counts: bool


class Serve(Request, frozen=True, kw_only=True):
    """Start the program that runs tasks; it asks for turns at the worker's endpoint."""

    endpoint: str
    key: str


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Say at which socket it runs tasks, or why it doesn't."""

    socket: str = ""
    error: str | None = None
    # it has ended, as it may again or not
    has_ended: bool = False


AnyRequest: TypeAlias = Reset | Step | Judge


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what a method of the environment returned."""

    # why it returned nothing that can be used
    error: str | None = None
    # None: it keeps to the row's prompt
    messages: list[Message] | None = None
    tools: list[Tool] = []
    done: bool = False
    reward: float | None = None
    # what the environment has measured, by name
    metrics: dict[str, float] = {}
