"""Change messages: other bytes, types, sizes and values than TLT writes to the streams."""

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec

_DEEP = 5000
_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e300,
    5e-324,
    0.5,
    "",
    "\0",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "w9",
    "*",
    "é" * 300,
    b"\xff",
    [],
    [[]] * 3,
    {},
    {"type": "EndJob"},
)
_encode = msgspec.msgpack.Encoder().encode


def changed_bytes(message: bytes, chooser: Random) -> bytes:
    """Flip, cut off, insert or repeat bytes, or nest deeply."""
    data, place = bytearray(message), chooser.randrange(len(message))
    match chooser.randrange(5):
        case 0:
            data[place] ^= 1 << chooser.randrange(8)
        case 1:
            del data[place:]
        case 2:
            data[place:place] = chooser.randbytes(chooser.randint(1, 9))
        case 3:
            data += data[place:]
        case _:
            data[place : place + 1] = b"\x91" * _DEEP + b"\x90"
    return bytes(data)


def changed_values(message: bytes, chooser: Random) -> bytes:
    """Replace, remove or add a value somewhere in the message."""
    content = msgspec.msgpack.decode(message)
    places = list(_places(content))
    for _ in range(chooser.randint(1, 2)):
        chooser.choice(places)(chooser)
    try:
        return _encode(content)
    except OverflowError:
        return message


def _places(value: Any) -> Iterator[Callable[[Random], None]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield lambda chooser, key=key: _change(value, key, chooser)
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _change(holder: Any, key: Any, chooser: Random) -> None:
    dice = chooser.random()
    try:
        if dice < 0.1:
            del holder[key]
        elif dice < 0.2 and isinstance(holder, dict):
            holder[f"{key}x"] = holder[key]
        elif dice < 0.35 and isinstance(holder[key], int):
            holder[key] += chooser.choice((-1, 1, 1000))
        else:
            holder[key] = chooser.choice(_VALUES)
    except (KeyError, IndexError):
        pass  # an earlier change has removed it
