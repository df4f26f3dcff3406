"""The pictures in the documentation are those of the page as it is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser

from docs.screenshots import take

pytestmark = pytest.mark.timeout(120)

_KEPT = Path("docs/images")
# pixels to a side: a chart covers several
_CELL = 96
# mean difference from the paper, of 255: less is empty
_EMPTY = 1.5
# another font has four fifths of the ink, or more
_ALIKE = 0.4


def test_they_look_as_the_page_does(browser: Browser, recorded: str, tmp_path: Path) -> None:
    """Fonts differ from machine to machine; what lies where does not."""
    take(browser, recorded, tmp_path)
    kept = sorted(_KEPT.glob("dashboard-*.png"))
    assert [file.name for file in kept] == sorted(file.name for file in tmp_path.glob("*.png"))
    for file in kept:
        with Image.open(file) as was, Image.open(tmp_path / file.name) as now:
            assert was.size == now.size
            assert unlike(was, now) == [], file.name


def test_a_chart_that_is_not_there_is_noticed() -> None:
    with Image.open(_KEPT / "dashboard-learning.png") as was:
        assert unlike(was, was) == []
        for left, top in ((60, 300), (480, 300), (900, 300)):
            now = was.copy()
            now.paste("white", (left, top, left + 300, top + 150))
            assert unlike(was, now) != []


def unlike(was: Image.Image, now: Image.Image) -> list[tuple[int, int]]:
    """Where there is far more in one of two pictures than in the other."""
    return [
        place
        for (place, one), (_, other) in zip(cells(was), cells(now), strict=True)
        if max(one, other) > _EMPTY and min(one, other) < _ALIKE * max(one, other)
    ]


def cells(picture: Image.Image) -> Iterator[tuple[tuple[int, int], float]]:
    """Where each lies, and its ink."""
    grey = picture.convert("L")
    for top in range(0, grey.height, _CELL):
        for left in range(0, grey.width, _CELL):
            right, bottom = min(left + _CELL, grey.width), min(top + _CELL, grey.height)
            tones = grey.crop((left, top, right, bottom)).histogram()
            paper = max(range(len(tones)), key=tones.__getitem__)
            ink = sum(count * abs(tone - paper) for tone, count in enumerate(tones))
            yield (left, top), ink / ((right - left) * (bottom - top))
