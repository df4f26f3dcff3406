"""Times are formatted for people, the same on the page and in the terminal."""

import pytest

from tlt.base.human_format import seconds


@pytest.mark.parametrize(
    ("value", "text"),
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
def test_formats_seconds_in_units_that_fit(value: float, text: str) -> None:
    assert seconds(value) == text
