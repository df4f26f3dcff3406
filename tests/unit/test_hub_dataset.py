"""A data set of the hub is loaded by the package `datasets`, where that is installed."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tlt.data.dataset import rows
from tlt.errors import DataError
from tlt.spec.config import DataSpec
from tlt.spec.prompt_files import train_files

URL = "hf://owner/name"
ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def read(url: str) -> list[Any]:
    return list(rows(train_files(DataSpec(train=url))[0]))


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("", {"split": "train"}),
        ("?config=main&split=test", {"name": "main", "split": "test"}),
        ("?split=train%5B%3A10%5D&revision=v1", {"split": "train[:10]", "revision": "v1"}),
    ],
)
def test_the_query_says_what_of_it(
    monkeypatch: pytest.MonkeyPatch, query: str, options: dict[str, str]
) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, **given: str) -> list[dict[str, str]]:
        asked.append((path, given))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    url = URL + query
    assert read(url) == [(f"{url}: row {n}", row) for n, row in enumerate(ROWS, start=1)]
    assert asked == [("owner/name", options)]


def test_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="hf://owner/name: this needs datasets: pip install"):
        read(URL)
    with pytest.raises(DataError, match="'splits' is none of config, split, revision"):
        read(f"{URL}?splits=train")

    def load_dataset(path: str, **given: str) -> None:
        raise ConnectionError("no network\nat all")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(DataError, match="cannot be loaded: ConnectionError: no network at all"):
        read(URL)
