"""Judge what was measured of foreign workloads."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.result import Claim

_NEVER_SLOWER, LEAST_OF_ONE = 0.97, 0.93
# one-sided 95 % of Student's t, for one degree of freedom and more
_T95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782),
    *(1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714),
)
# of perturbed logits: an order above the rounding of the deepest policy's logits in float32
_TIE = 1e-4


def make_claims(details: Mapping[str, Any]) -> list[Claim]:
    claims: list[Claim] = []
    if "decoding" in details:
        claims += _decoding_claims(details["decoding"])
    if "disguised" in details:
        claims.append(_disguised_claim(details["disguised"]["ledger"]))
    if "jobs" in details:
        claims += _job_claims(list(details["jobs"].values()))
    return claims


def _job_claims(jobs: Sequence[Sequence[float]]) -> list[Claim]:
    """Pool the mean of each workload's pairs; the least is that of the repeated ones."""
    least = min(ratios[-1] for ratios in jobs)
    claims = [Claim(name="foreign.jobs_off_over_tlt_min", value=least, unit="x", bar=LEAST_OF_ONE)]
    if len(jobs) < 2:
        return claims
    _, low, _ = interval([fmean(map(math.log, ratios)) for ratios in jobs])
    pooled = Claim(
        name="foreign.jobs_off_over_tlt", value=round(low, 4), unit="x", bar=_NEVER_SLOWER
    )
    return [pooled, *claims]


def _decoding_claims(decoding: Mapping[str, Any]) -> list[Claim]:
    verdicts = [result["verdict"] for result in decoding.values()]
    gaps = [gap for result in decoding.values() for gap in result["gaps_of_different_answers"]]
    answers = sum(result["answers"] for result in decoding.values())
    return [
        Claim(
            name="foreign.identical_share",
            value=round(1 - len(gaps) / answers, 6),
            unit="",
            bar=0.999,
        ),
        _at_most("foreign.widest_tie", max(gaps, default=0.0), "", _TIE),
        _at_most("foreign.failed", verdicts.count("failed"), "workloads", 0),
        _at_most("foreign.undecided", verdicts.count("undecided"), "workloads", 2),
        Claim(
            name="foreign.rollout_off_over_tlt_min",
            value=min(result["off_over_tlt"] for result in decoding.values()),
            unit="x",
            bar=LEAST_OF_ONE,
        ),
        *_ledger_claims([result["ledger"] for result in decoding.values()]),
    ]


def _ledger_claims(ledgers: Sequence[dict[str, Any]]) -> list[Claim]:
    """Judge the claims of the workloads that have control runs enough for one."""
    known = [ledger for ledger in ledgers if "claim" in ledger]
    off = math.fsum(ledger["off"] for ledger in known)
    bias = math.fsum(ledger["off"] * (ledger["claim"] - ledger["truth"]) for ledger in known) / off
    share = fmean(ledger["true"] for ledger in known)
    return [
        Claim(name="foreign.ledger_true_share", value=round(share, 3), unit="", bar=0.8),
        _at_most("foreign.ledger_bias", round(abs(bias), 4), "of off", 0.02),
    ]


def _disguised_claim(ledger: Mapping[str, Any]) -> Claim:
    """Judge the claimed cost of being able to speculate by the one that the pairs show."""
    name = "foreign.disguised_savings"
    return _at_most(name, ledger["standard_errors"], "standard errors", 2)


def _at_most(name: str, value: float, unit: str, bar: float) -> Claim:
    return Claim(name=name, value=value, unit=unit, bar=bar, less_is_better=True)


def verdict(low: float, high: float) -> str:
    if low >= _NEVER_SLOWER:
        return "passed"
    return "failed" if high < _NEVER_SLOWER else "undecided"


def interval(logs: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean and its one-sided 95 % bounds."""
    mean, error = fmean(logs), stdev(logs) / math.sqrt(len(logs))
    wide = _T95[len(logs) - 2] * error
    return math.exp(mean), math.exp(mean - wide), math.exp(mean + wide)
