"""Invariant: every event and command survives the wire, the journal and the unions it stands in."""

import inspect
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import members, messages, prompt
from tlt.errors import StoreError
from tlt.protocol import commands, events, refs, shared_values
from tlt.protocol.commands import (
    Command,
    PromptIssued,
    RunCommand,
    SessionCommand,
    ToWorker,
    UserCommand,
    WorkerCommand,
)
from tlt.protocol.events import AnyEvent, Event, RunEvent, SessionEvent
from tlt.protocol.shared_values import Heartbeat, JobRecord
from tlt.store.message_codec import Codec

EVENTS = members(AnyEvent)
COMMANDS = members(RunCommand | SessionCommand | UserCommand)


def _leaves(base: type) -> set[type]:
    """Return the subclasses that have no subclasses themselves."""
    modules = (refs, shared_values, events, commands)
    classes = [
        kind for module in modules for _, kind in inspect.getmembers(module, inspect.isclass)
    ]
    below = {kind for kind in classes if issubclass(kind, base)}
    return {kind for kind in below if not any(issubclass(k, kind) for k in below - {kind})}


def test_unions_hold_every_event_and_every_command() -> None:
    assert set(EVENTS) == set(members(SessionEvent)) | set(members(RunEvent))
    assert {kind for kind in EVENTS if not issubclass(kind, Command)} == _leaves(Event)
    assert set(COMMANDS) == _leaves(Command)
    assert set(members(WorkerCommand)) == _leaves(ToWorker)


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_events_survive_the_wire_and_the_journal(kind: type[Any], data: st.DataObject) -> None:
    event = data.draw(messages(kind))
    codec = Codec[AnyEvent](AnyEvent)
    assert codec.decode(codec.encode(event)) == event
    assert msgspec.json.decode(msgspec.json.encode(event), type=AnyEvent) == event


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_commands_survive_the_wire(kind: type[Any], data: st.DataObject) -> None:
    command = data.draw(messages(kind))
    codec = Codec[Any](RunCommand | SessionCommand | UserCommand)
    assert codec.decode(codec.encode(command)) == command


@pytest.mark.parametrize("kind", [PromptIssued, Heartbeat, JobRecord])
@settings(max_examples=12)
@given(data=st.data())
def test_other_values_survive_the_wire(kind: type[Any], data: st.DataObject) -> None:
    value = data.draw(messages(kind))
    codec = Codec[Any](kind)
    assert codec.decode(codec.encode(value)) == value
    assert msgspec.json.decode(msgspec.json.encode(value), type=kind) == value


@pytest.mark.parametrize("kind", [*EVENTS, *COMMANDS, PromptIssued], ids=lambda k: k.__name__)
def test_messages_are_frozen_and_tagged_with_their_names(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.tag == kind.__name__


@given(version=st.binary(max_size=3), body=st.binary(max_size=40))
def test_any_bytes_are_a_message_or_a_store_error(version: bytes, body: bytes) -> None:
    codec = Codec[AnyEvent](AnyEvent)
    good = codec.encode(msgspec.structs.replace(_CANCEL, job="x"))
    for fields in ({b"v": version, b"m": body}, {**good, b"m": body}, {**good, b"v": version}):
        try:
            codec.decode(fields)
        except StoreError:
            continue
        assert fields[b"v"] == good[b"v"]


_CANCEL = events.CancelJob(job=prompt(0).job)
