"""Read a data set of the Hugging Face Hub: `hf://OWNER/NAME?config=C&split=S&revision=R`."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

from tlt.errors import DataError
from tlt.spec.data_and_algorithm import HUB

_OPTIONS = {"config": "name", "split": "split", "revision": "revision"}


def hub_rows(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its location; the split is `train` if none is named."""
    name, _, query = url.removeprefix(HUB).partition("?")
    options = {"split": "train"}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _OPTIONS:
            raise DataError(f"{url}: '{key}' is none of {', '.join(_OPTIONS)}")
        options[_OPTIONS[key]] = value
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(f"{url}: this needs datasets: pip install datasets") from error
    try:
        found = datasets.load_dataset(name, **options)
    except Exception as error:  # no network, no such data set, or one that doesn't fit its features
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{url}: cannot be loaded: {text}") from error
    for number, row in enumerate(found, start=1):
        yield f"{url}: row {number}", dict(row)
