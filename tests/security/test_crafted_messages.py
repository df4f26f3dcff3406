"""Crafted messages end as errors of one kind, and change a run no more than an event may."""

import asyncio
import math
import socket
from collections import Counter
from random import Random
from typing import Any, cast, get_args

import msgspec
import pytest

from tests.crafted import changed_bytes, changed_values
from tests.samples import JOB, SPEC, prompt
from tests.simulation.walk import walk
from tlt.base.id_types import Incarnation, Step, WorkerId
from tlt.errors import RankError, StoreError
from tlt.policies.run import coordinator
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import PromptIssued, ToWorker, WorkerCommand
from tlt.protocol.events import (
    AnyEvent,
    RolloutDropped,
    RolloutFinished,
    RolloutScored,
    RunEvent,
    WorkerEvent,
    WorkerIdled,
    WorkerStepEvent,
)
from tlt.protocol.rank_messages import DecodePrompts, FromRank, RankReady
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.ranks.worker_channel import RankChannel, read_from_rank
from tlt.store.message_codec import Codec

SEED = 2
WALKS = 8
_events = Codec[AnyEvent](AnyEvent)
_encode = msgspec.msgpack.Encoder().encode
_line = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(AnyEvent).decode


class Moment(msgspec.Struct, frozen=True):
    """An event, and the state that it met."""

    state: RunState
    event: RunEvent
    now: float


class History:
    """The decisions of simulated runs, with the faults and the repeated events of these runs."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.commands: list[ToWorker] = []

    def decide(self, state: RunState, event: RunEvent, now: float) -> tuple[RunState, list[Any]]:
        after, commands = coordinator.decide(state, event, now)
        self.moments.append(Moment(state, event, now))
        self.commands += [each for each in commands if isinstance(each, ToWorker)]
        return after, commands


@pytest.fixture(scope="module")
def history() -> History:
    found = History()
    for seed in range(WALKS):
        walk(Random(seed), found.decide)
    return found


def fields(message: bytes) -> dict[bytes, bytes]:
    return {b"v": b"%d" % SCHEMA_VERSION, b"m": message}


def crafted(message: Any, chooser: Random) -> bytes:
    change = chooser.choice((changed_bytes, changed_values, changed_values))
    return change(_encode(message), chooser)


@pytest.mark.parametrize(
    ("key", "value"), [("gradient_clip", math.inf), ("learning_rate", math.inf), ("steps", 2**64)]
)
def test_a_spec_holds_no_number_that_a_journal_cannot(key: str, value: Any) -> None:
    algorithm = msgspec.structs.replace(SPEC.algorithm, **{key: value})
    with pytest.raises(ValueError, match=rf"algorithm\.{key} must be a finite number below 2"):
        msgspec.structs.replace(SPEC, algorithm=algorithm)


def test_what_cannot_be_read_is_a_store_error(history: History) -> None:
    chooser, refused = Random(SEED), 0
    prompts = [prompt(index) for index in range(9)]
    for kind, samples in (
        (AnyEvent, [moment.event for moment in history.moments]),
        (WorkerCommand, history.commands),
        (PromptIssued, prompts),
    ):
        codec = Codec[Any](kind)
        for _ in range(300):
            message = crafted(chooser.choice(samples), chooser)
            try:
                codec.decode(fields(message))
            except StoreError:
                refused += 1
    assert 300 < refused < 900


async def test_what_a_rank_or_its_worker_cannot_read_is_a_rank_error(history: History) -> None:
    chooser, refused = Random(SEED), 0
    from_rank = [m.event for m in history.moments if type(m.event) in get_args(FromRank)]
    to_rank = [*history.commands, DecodePrompts(job=JOB, prompts=(prompt(1), prompt(2)))]
    for _ in range(300):
        message = crafted(chooser.choice([*from_rank, RankReady(rendezvous="h:1")]), chooser)
        reader = asyncio.StreamReader()
        reader.feed_data(len(message).to_bytes(8, "little") + message)
        reader.feed_eof()
        try:
            await read_from_rank(reader)
        except RankError:
            refused += 1
        refused += not can_rank_read(crafted(chooser.choice(to_rank), chooser))
    assert 200 < refused < 600


def can_rank_read(message: bytes) -> bool:
    ours, theirs = socket.socketpair()
    with ours:
        channel = RankChannel(theirs.detach())
        ours.sendall(len(message).to_bytes(8, "little") + message)
        try:
            return len(channel.receive(wait=0.0)) == 1
        except RankError:
            return False
        finally:
            channel.close()


async def test_no_announced_length_makes_a_reader_wait_or_allocate() -> None:
    announced = (1 << 60).to_bytes(8, "little")
    reader = asyncio.StreamReader()
    reader.feed_data(announced)
    with pytest.raises(RankError, match="was announced"):
        await read_from_rank(reader)
    ours, theirs = socket.socketpair()
    channel = RankChannel(theirs.detach())
    with ours:
        ours.sendall(announced)
        with pytest.raises(RankError, match="was announced"):
            channel.receive(wait=0.0)
    channel.close()


def test_no_readable_nonsense_ends_a_run(history: History) -> None:
    """Nor does it leave what a journal can't hold, or end a later decision."""
    chooser, decided = Random(SEED), 0
    while decided < 500:
        place = chooser.randrange(len(history.moments))
        met = history.moments[place]
        try:
            event = _events.decode(fields(changed_values(_encode(met.event), chooser)))
        except StoreError:
            continue
        assert _decode_line(_line(event)) == event
        state, commands = coordinator.decide(met.state, cast("RunEvent", event), met.now)
        _encode((state, commands))
        decided += 1
        for later in history.moments[place : place + 5]:
            state, _ = coordinator.decide(state, later.event, later.now)


def test_events_of_others_and_of_far_steps_change_nothing(history: History) -> None:
    wrong = {"worker": WorkerId("w9"), "incarnation": Incarnation(10**6), "step": Step(10**6)}
    checked = Counter[str]()
    for met in history.moments:
        for field, value in wrong.items():
            if not isinstance(met.event, _CHECKED[field]):
                continue
            event = msgspec.structs.replace(met.event, **{field: value})
            after, commands = coordinator.decide(met.state, event, met.now)
            assert after == met.state, event
            assert commands == []
            checked[field] += 1
    assert min(checked[field] for field in wrong) > 100


_ANSWERS = (RolloutFinished, RolloutScored, RolloutDropped, WorkerIdled)
_CHECKED = {
    "worker": (WorkerEvent, WorkerStepEvent),
    "incarnation": (WorkerEvent, WorkerStepEvent),
    "step": _ANSWERS,
}
