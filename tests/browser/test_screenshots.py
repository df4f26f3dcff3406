"""The pictures in the documentation match the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser

from docs.screenshots import take

pytestmark = [pytest.mark.live, pytest.mark.timeout(120)]

_PICTURES = Path("docs/images")
# side of a cell in pixels; a chart covers several cells
_CELL = 96
# mean difference from the background (of 255) below which a cell is empty
_EMPTY = 1.5
# smallest share of ink that matching pictures have in common; another font shares four fifths
_ALIKE = 0.4


def test_documented_pictures_match_the_page(
    browser: Browser, recorded: str, tmp_path: Path
) -> None:
    """Fonts differ between machines, so cells are compared by their ink."""
    take(browser, recorded, tmp_path)
    kept = sorted(_PICTURES.glob("dashboard-*.png"))
    assert [file.name for file in kept] == sorted(file.name for file in tmp_path.glob("*.png"))
    for file in kept:
        with Image.open(file) as was, Image.open(tmp_path / file.name) as now:
            assert was.size == now.size
            assert unlike(was, now) == [], file.name


def test_notices_a_missing_chart() -> None:
    with Image.open(_PICTURES / "dashboard-learning.png") as was:
        assert unlike(was, was) == []
        for left, top in ((60, 300), (480, 300), (900, 300)):
            now = was.copy()
            now.paste("white", (left, top, left + 300, top + 150))
            assert unlike(was, now) != []


def unlike(was: Image.Image, now: Image.Image) -> list[tuple[int, int]]:
    """Return the cells with far more ink in one picture than in the other."""
    return [
        position
        for (position, one), (_, other) in zip(cells(was), cells(now), strict=True)
        if max(one, other) > _EMPTY and min(one, other) < _ALIKE * max(one, other)
    ]


def cells(picture: Image.Image) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the position and the ink of each cell."""
    grey = picture.convert("L")
    for top in range(0, grey.height, _CELL):
        for left in range(0, grey.width, _CELL):
            right, bottom = min(left + _CELL, grey.width), min(top + _CELL, grey.height)
            tones = grey.crop((left, top, right, bottom)).histogram()
            background = max(range(len(tones)), key=tones.__getitem__)
            ink = sum(count * abs(tone - background) for tone, count in enumerate(tones))
            yield (left, top), ink / ((right - left) * (bottom - top))
