"""A job speculates and trains a drafter unless its spec says otherwise, or it can't."""

from typing import Any

import msgspec
import pytest

from tests.unit.test_config import RAW, parse
from tlt.errors import ConfigError
from tlt.spec.config import JobSpec


def settled(**changes: Any) -> tuple[str, object]:
    """Return mode and drafter training of the job that a spec describes, as far as that tells."""
    spec = parse(**changes)
    spec = spec.settle_speculation(spec.complain_of_speculation())
    return spec.speculation.mode, spec.drafter.train


def test_speculates_and_trains_the_drafter_by_default() -> None:
    assert settled() == ("adaptive", "auto")
    assert settled(drafter__train="always") == ("adaptive", "always")
    assert settled(drafter__train="off") == ("adaptive", "off")
    assert settled(speculation__depths=[]) == ("adaptive", "off")
    assert settled(speculation={"mode": "static", "strategy": {"type": "ngram", "tokens": 4}}) == (
        "static",
        "off",
    )


def test_off_is_one_word() -> None:
    assert settled(speculation__mode="off") == ("off", "off")
    for train in ("auto", "always"):
        with pytest.raises(ConfigError, match=r"drafter.train needs decoding with the drafter"):
            parse(speculation__mode="off", drafter__train=train)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"rollout": {"engine": "sglang", "eval_min_p": 0.1}},
            r"rollout.eval_min_p with speculation needs rollout.engine: native",
        ),
        (
            {"rollout__max_new_tokens": 8},
            r"speculation guesses 12 tokens at once, and an answer has room for 8",
        ),
        ({"policy__max_context": 12}, r"guesses 12 tokens at once, and an answer has room for 12"),
    ],
)
def test_only_explicit_speculation_is_refused(changes: dict[str, Any], complaint: str) -> None:
    assert settled(**changes) == ("off", "off")
    for explicit in ({"speculation__mode": "adaptive"}, {"drafter__train": "always"}):
        with pytest.raises(ConfigError, match=complaint):
            parse(**changes, **explicit)


def test_a_job_that_only_evaluates_trains_no_drafter_by_default() -> None:
    held_out = {"algorithm": {**RAW["algorithm"], "steps": 0, "eval_every": 1}, "data__eval": "e"}
    assert settled(**held_out) == ("adaptive", "off")


def test_a_stored_spec_says_whether_it_speculates() -> None:
    stored = msgspec.json.encode(parse(speculation__mode="off"))
    assert b'"mode":"off"' in stored
    assert b'"train":"off"' in stored
    again = msgspec.json.decode(stored, type=JobSpec)
    assert again.settle_speculation(None) == again
    for spec in (parse(), parse().settle_speculation(None)):
        assert b'"train":"auto"' in msgspec.json.encode(spec)
