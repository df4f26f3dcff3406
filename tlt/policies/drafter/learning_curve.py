"""How good a drafter becomes with so many more micro-batches, from how good it has become.

Accept length rises as a saturating exponential of the micro-batches. Three numbers describe it;
what was measured and what drafters of other policies did decide which are likely (a maximum of the
posterior on a grid, which no series of measurements can make diverge).
"""

import math
from collections.abc import Sequence

import msgspec

from tlt.ids import DrafterVersion

# of drafters of one layer that began with random weights: accept length at the plateau, and the
# micro-batches until two thirds of the way there are done
_PLATEAU, _PLATEAU_SPREAD = 4.5, 1.2
_SPAN, _SPAN_SPREAD = 250.0, 0.7
# of a canary's accept length, measured on a few answers
_ERROR = 0.15
# by what new answers may lift the end of a curve
_LIFT = 0.15
# accept lengths that count; more of them would say little about what comes next
MOST_MARKS = 40
# of them, those which tell whether it still goes up, and what they must tell beyond
_LATELY, _DOUBT = 4, 0.1
_PLATEAUS = tuple(1.0 + 0.25 * i for i in range(33))
_SPANS = tuple(20.0 * 1.3**i for i in range(20))


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """After so many micro-batches: the accept lengths of the drafter in use and of the new one."""

    version: DrafterVersion
    updates: int
    used: float | None
    trained: float


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    # where it is now, and where it ends
    now: float
    plateau: float
    span: float

    def after(self, updates: float) -> float:
        left = math.exp(-max(0.0, updates) / self.span)
        return self.plateau - (self.plateau - self.now) * left


def curve(start: float | None, marks: Sequence[Mark]) -> Curve:
    """`start`: the accept length before any training, if it began with a drafter."""
    began = 1.0 if start is None else start
    seen = marks[-MOST_MARKS:]
    usual = max(_PLATEAU, began)
    least, plateau, span = math.inf, began, _SPAN
    for some_span in _SPANS:
        rare = (math.log(some_span / _SPAN) / _SPAN_SPREAD) ** 2
        fit = _fit(began, some_span, seen)
        for some_plateau in _PLATEAUS:
            if some_plateau < began:
                continue
            unlikely = rare + ((some_plateau - usual) / _PLATEAU_SPREAD) ** 2
            unlikely += fit.missed(some_plateau - began)
            if unlikely < least:
                least, plateau, span = unlikely, some_plateau, some_span
    # the policy moves: what was measured last counts, wherever on the curve that is
    now = max(seen[-1].used or 1.0, seen[-1].trained) if seen else began
    return Curve(now=min(now, plateau), plateau=plateau, span=span)


def going_on(found: Curve, marks: Sequence[Mark]) -> Curve:
    """As if gains that the last canaries found faded no faster than usual.

    The few answers of the first steps have an end of their own, and a curve through what was
    measured on them takes it for the drafter's. Later answers lift it; each canary shows that by
    what is new beside what is used, on the same answers.
    """
    late = marks[-_LATELY - 1 :]
    if len(late) <= _LATELY:
        return found
    gains = sum(mark.trained - (mark.used or 1.0) for mark in late[1:])
    updates = late[-1].updates - late[0].updates
    now = max(late[-1].used or 1.0, late[-1].trained)
    rise = _SPAN * (gains - _DOUBT) / updates if updates > 0 else 0.0
    if rise <= 0.0 or now + rise <= found.plateau:
        return found
    return Curve(now=now, plateau=now + rise, span=_SPAN)


def lifted(found: Curve) -> Curve:
    """A curve that has ended, as far as answers that no canary has seen may lift its end."""
    if found.plateau >= found.now + _LIFT:
        return found
    return Curve(now=found.now, plateau=found.now + _LIFT, span=_SPAN)


class _Fit(msgspec.Struct, frozen=True):
    """Squared errors of all marks, as a parabola in how far the plateau is above the beginning."""

    constant: float
    linear: float
    square: float

    def missed(self, rise: float) -> float:
        return self.constant - 2.0 * rise * self.linear + rise * rise * self.square


def _fit(began: float, span: float, marks: Sequence[Mark]) -> _Fit:
    gains = [(mark.trained - began) / _ERROR for mark in marks]
    shares = [(1.0 - math.exp(-mark.updates / span)) / _ERROR for mark in marks]
    return _Fit(
        sum(gain * gain for gain in gains),
        sum(gain * share for gain, share in zip(gains, shares, strict=True)),
        sum(share * share for share in shares),
    )
