"""An answer loses nothing before the last tokens, and all of the penalty at the limit."""

import msgspec
import pytest

from tests.samples import SPEC
from tlt.policies.algorithm.advantages import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0.0), (80, 0.0), (85, 0.125), (90, 0.25), (100, 0.5), (120, 0.5)]
)
def test_the_penalty_rises_over_the_last_tokens(length: int, expected: float) -> None:
    spec = msgspec.structs.replace(SPEC.algorithm, overlong_tokens=20, overlong_penalty=0.5)
    assert overlong_penalty(spec, length, limit=100) == pytest.approx(expected)


@pytest.mark.parametrize(("length", "expected"), [(1, 0.025), (5, 0.125), (20, 0.5)])
def test_the_penalty_rises_from_the_first_token_where_few_have_room(
    length: int, expected: float
) -> None:
    spec = msgspec.structs.replace(SPEC.algorithm, overlong_tokens=80, overlong_penalty=0.5)
    assert overlong_penalty(spec, length, limit=20) == pytest.approx(expected)


def test_there_is_none_by_default() -> None:
    assert overlong_penalty(SPEC.algorithm, 100, limit=100) == 0.0
