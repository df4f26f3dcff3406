"""Contrast of text and of duty colours is sufficient in the light and the dark theme."""

import re
from itertools import combinations, product
from pathlib import Path

import pytest

from tlt.policies.run.run_state import Duty
from tlt.report.duties import AWAY, WAITING_FOR_WEIGHTS

_TEXT = ("text", "muted", "accent", "bad", "warn", "good")
_BACKGROUNDS = ("background", "card", "inset")
_PAIRS = (
    ("bad", "bad-background"),
    ("warn", "warn-background"),
    ("good", "good-background"),
    ("accent", "note-background"),
    ("text", "bad-background"),
    ("text", "warn-background"),
    ("text", "note-background"),
    ("text", "accepted"),
    ("text", "corrected"),
    ("on-accent", "accent"),
)
_DUTIES = (*(duty.value for duty in Duty), WAITING_FOR_WEIGHTS, AWAY)


def _themes() -> dict[str, dict[str, str]]:
    sheet = Path("tlt/dashboard/static/style.css").read_text()
    hexes = "(#[0-9a-f]{6})"
    pairs = re.findall(rf"--([\w-]+): light-dark\({hexes}, {hexes}\)", sheet)
    return {
        "light": {name: light for name, light, _ in pairs},
        "dark": {name: dark for name, _, dark in pairs},
    }


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast(theme: str) -> None:
    colours = _themes()[theme]
    for text, paper in (*product(_TEXT, _BACKGROUNDS), *_PAIRS):
        assert contrast(colours[text], colours[paper]) >= 4.5, (theme, text, paper)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_duties_and_batches_have_enough_contrast(theme: str) -> None:
    """They are drawn on lanes and, in the legend, on a card."""
    colours = _themes()[theme]
    for shape, paper in (*product(_DUTIES, ("inset", "card")), ("batch", "card")):
        assert contrast(colours[shape], colours[paper]) >= 3, (theme, shape, paper)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_duties_differ_from_each_other(theme: str) -> None:
    colours = _themes()[theme]
    for one, other in combinations((*_DUTIES, "batch"), 2):
        apart = sum(
            abs(int(colours[one][i : i + 2], 16) - int(colours[other][i : i + 2], 16))
            for i in (1, 3, 5)
        )
        assert apart >= 90, (theme, one, other, apart)
