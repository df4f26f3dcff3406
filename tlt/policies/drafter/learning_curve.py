"""Predict a drafter's accept length after further micro-batches.

Accept length rises as a saturating exponential of the micro-batches. Its three numbers are the
maximum of a posterior on a grid. Its priors come from drafters of other policies, and no series of
measurements makes the fit diverge.
"""

import math
from collections.abc import Sequence

import msgspec

from tlt.base.id_types import DrafterVersion

# priors, from drafters of one layer that began with random weights: accept length at the plateau,
# and micro-batches until two thirds of the rise are done
_PLATEAU, _PLATEAU_SPREAD = 4.5, 1.2
_SPAN, _SPAN_SPREAD = 250.0, 0.7
# error of an evaluation's accept length, measured on a few answers
_ERROR = 0.15
# accept length by which new answers may lift a plateau
_LIFT = 0.15
# evaluations that the fit uses; older ones say little about the next
MOST_EVALUATIONS = 40
_PLATEAUS = tuple(1.0 + 0.25 * i for i in range(33))
_SPANS = tuple(20.0 * 1.3**i for i in range(20))


class EvaluatedVersion(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Accept lengths of the drafter in use and of the trained one, by micro-batches so far."""

    version: DrafterVersion
    micro_batches: int
    accept_length_before: float | None
    accept_length: float


class LearningCurve(msgspec.Struct, frozen=True, kw_only=True):
    # accept lengths
    now: float
    plateau: float
    # micro-batches
    span: float

    def after(self, micro_batches: float) -> float:
        left = math.exp(-max(0.0, micro_batches) / self.span)
        return self.plateau - (self.plateau - self.now) * left


def fit_curve(initial: float | None, evaluations: Sequence[EvaluatedVersion]) -> LearningCurve:
    """Fit a curve; `initial` is the accept length before training, if there was a drafter."""
    began = 1.0 if initial is None else initial
    seen = evaluations[-MOST_EVALUATIONS:]
    usual = max(_PLATEAU, began)
    least, plateau, span = math.inf, began, _SPAN
    for some_span in _SPANS:
        rare = (math.log(some_span / _SPAN) / _SPAN_SPREAD) ** 2
        errors = _fit_span(began, some_span, seen)
        for some_plateau in _PLATEAUS:
            if some_plateau < began:
                continue
            unlikely = rare + ((some_plateau - usual) / _PLATEAU_SPREAD) ** 2
            unlikely += errors.at(some_plateau - began)
            if unlikely < least:
                least, plateau, span = unlikely, some_plateau, some_span
    # the policy moves, so the last measurement counts even where it lies off the curve
    now = max(seen[-1].accept_length_before or 1.0, seen[-1].accept_length) if seen else began
    return LearningCurve(now=min(now, plateau), plateau=plateau, span=span)


def lift_plateau(curve: LearningCurve) -> LearningCurve:
    """Raise a curve that has ended by the possible gain from answers not yet evaluated."""
    if curve.plateau >= curve.now + _LIFT:
        return curve
    return LearningCurve(now=curve.now, plateau=curve.now + _LIFT, span=_SPAN)


class _SquaredErrors(msgspec.Struct, frozen=True):
    """Squared errors of all evaluations: a parabola in the plateau's height above the beginning."""

    constant: float
    linear: float
    square: float

    def at(self, rise: float) -> float:
        return self.constant - 2.0 * rise * self.linear + rise * rise * self.square


def _fit_span(began: float, span: float, evaluations: Sequence[EvaluatedVersion]) -> _SquaredErrors:
    gains = [(each.accept_length - began) / _ERROR for each in evaluations]
    shares = [(1.0 - math.exp(-each.micro_batches / span)) / _ERROR for each in evaluations]
    return _SquaredErrors(
        sum(gain * gain for gain in gains),
        sum(gain * share for gain, share in zip(gains, shares, strict=True)),
        sum(share * share for share in shares),
    )
