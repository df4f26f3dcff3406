"""The pictures in the documentation are those of the page as it is."""

from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat
from playwright.sync_api import Browser

from docs.screenshots import take

pytestmark = pytest.mark.timeout(120)


def test_they_look_as_the_page_does(browser: Browser, recorded: str, tmp_path: Path) -> None:
    """Fonts differ from machine to machine; what lies where does not."""
    take(browser, recorded, tmp_path)
    kept = sorted(Path("docs/images").glob("dashboard-*.png"))
    assert [file.name for file in kept] == sorted(file.name for file in tmp_path.glob("*.png"))
    for file in kept:
        with Image.open(file) as was, Image.open(tmp_path / file.name) as now:
            assert was.size == now.size
            small = (was.width // 32, was.height // 32)
            difference = ImageChops.difference(
                was.convert("RGB").resize(small), now.convert("RGB").resize(small)
            )
            assert max(ImageStat.Stat(difference).mean) < 12, file.name
