"""Name what takes memory on a device, how much, and when."""

from typing import Literal

import msgspec

# `always` stays. Of the others only one is taken at a time, because a rank does one thing at a
# time; what belongs to a whole policy update is taken in each of its parts.
Phase = Literal[
    "always",
    # freed for the updates of the policy
    "between updates",
    "decoding",
    "policy update",
    "update: passes",
    "update: scoring",
    "update: backward",
    "update: reduction",
    "weight swap",
    "drafter training",
    "drafter merge",
]
_PARTS: dict[Phase, tuple[Phase, ...]] = {
    "decoding": ("between updates", "decoding"),
    "update: scoring": ("policy update", "update: passes", "update: scoring"),
    "update: backward": ("policy update", "update: passes", "update: backward"),
    "update: reduction": ("policy update", "update: reduction"),
    "weight swap": ("between updates", "weight swap"),
    "drafter training": ("between updates", "drafter training"),
    "drafter merge": ("between updates", "drafter merge"),
}


class Item(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bytes: int
    during: Phase = "always"
    # what the figure assumes
    note: str = ""


def peak_bytes(items: tuple[Item, ...]) -> int:
    """Return what stays, and the most that any phase adds."""
    return sum(item.bytes for item in peak_items(items))


def peak_items(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Return the items that are held together when the most is held."""
    phases = ("always", *_PARTS[peak_phase(items)])
    return tuple(item for item in items if item.during in phases)


def peak_phase(items: tuple[Item, ...]) -> Phase:
    return max(_PARTS, key=lambda phase: _phase_bytes(items, phase))


def _phase_bytes(items: tuple[Item, ...], phase: Phase) -> int:
    return sum(item.bytes for item in items if item.during in _PARTS[phase])
