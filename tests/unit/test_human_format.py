"""Times as people read them, on the page as in the terminal."""

import pytest

from tlt.human_format import seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3.14, "3.1 s"),
        (59.9, "59.9 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (61, "1 min 01 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_seconds_are_said_in_units_that_fit(value: float, said: str) -> None:
    assert seconds(value) == said
