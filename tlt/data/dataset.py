"""Read data sets as users have them (JSONL, parquet, Arrow), and store prompts as a job uses them.

Every row is complete: a missing or malformed part is an error with its file and line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from tlt.base.id_types import PromptIndex, Purpose
from tlt.data.columns import find_column, lack_of_column, require_column
from tlt.data.reasoning_gym_tasks import gym_rows
from tlt.data.verifiers_tasks import task_rows
from tlt.errors import DataError
from tlt.spec.config import DataSpec
from tlt.spec.data_and_algorithm import GYM, HUB, TASKSET
from tlt.spec.prompt_files import PromptFile

_HUB_OPTIONS = {"config": "name", "split": "split", "revision": "revision"}


def hub_rows(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its location; the split is `train` if none is named."""
    name, _, query = url.removeprefix(HUB).partition("?")
    options = {"split": "train"}
    for key, value in parse_qsl(query, keep_blank_values=True):
        if key not in _HUB_OPTIONS:
            raise DataError(f"{url}: '{key}' is none of {', '.join(_HUB_OPTIONS)}")
        options[_HUB_OPTIONS[key]] = value
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


Row = dict[str, Any]


def rows(file: PromptFile) -> Iterator[tuple[str, Row]]:
    """Yield each row with the location to name in an error."""
    empty = True
    is_taskset = file.path.startswith(TASKSET)
    found = task_rows(file.path, file.environment) if is_taskset else read_rows(file.path)
    for location, row in found:
        empty = False
        prompt = find_column(row, file.prompt.name)
        if prompt is None:
            raise lack_of_column(row, file.prompt, location)
        if not isinstance(prompt, str | list) or not prompt:
            what = f"'{file.prompt.name}' is neither text nor a list of messages"
            raise DataError(f"{location}: {what} ({file.prompt.key})")
        if file.answer is not None:
            require_column(row, file.answer, location)
        yield location, row
    if empty:
        raise DataError(f"{file.path}: it has no rows")


def conversation(prompt: Any, spec: DataSpec) -> Any:
    """Return a prompt as the policy gets it: its messages with a chat template, else its text."""
    if not spec.chat_template:
        return prompt
    messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if spec.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": spec.system_prompt})
    return messages


def read_rows(source: str | Path) -> Iterator[tuple[str, Row]]:
    """Yield rows of any columns, each with its location; of a folder, file by file."""
    if str(source).startswith(HUB):
        return hub_rows(str(source))
    if str(source).startswith(GYM):
        return gym_rows(str(source))
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in _READERS)
        if not files:
            raise DataError(f"{path}: no file ends with {', '.join(_READERS)}")
        return chain.from_iterable(_READERS[file.suffix](file) for file in files)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    return _READERS.get(path.suffix, _jsonl)(path)


def _jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{location}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{location}: a row is a JSON object")
            yield location, row


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    def batches() -> Iterator[Any]:
        import pyarrow.parquet

        yield from pyarrow.parquet.ParquetFile(path).iter_batches()

    return _rows_of_batches(path, batches)


def _arrow(path: Path) -> Iterator[tuple[str, Row]]:
    """Read a file that `datasets` has saved, as a stream or as a file of Arrow."""

    def batches() -> Iterator[Any]:
        import pyarrow

        with pyarrow.memory_map(str(path)) as source:
            try:
                yield from pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:
                source.seek(0)
                file = pyarrow.ipc.open_file(source)
                yield from (file.get_batch(index) for index in range(file.num_record_batches))

    return _rows_of_batches(path, batches)


def _rows_of_batches(path: Path, batches: Callable[[], Iterator[Any]]) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: this needs pyarrow: pip install pyarrow") from error
    number = 0
    try:
        for batch in batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


_READERS: Mapping[str, Callable[[Path], Iterator[tuple[str, Row]]]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared row: its tokens go to a rank, the row itself to the reward."""

    tokens: tuple[int, ...]
    row: Row
    # the row's answer, if the data has one
    answer: Any = None
    # the evaluation set that it belongs to
    set: str | None = None
    # tokens that the policy's context leaves for an answer; None in data of earlier versions
    room: int | None = None
    # its text opens a thought, which the answer goes on with
    in_thought: bool = False
    # the names that rewards know it by: its set's or source's, and that in its own column
    sources: tuple[str, ...] = ()


def prompt_of(prompt: Prompt, data: DataSpec) -> Any:
    """Return a row's text or messages; an evaluation set may have a column of its own for them."""
    held_out = data.evaluation_sets.get(prompt.set or "")
    name = (held_out and held_out.prompt_key) or data.prompt_key
    return find_column(prompt.row, name)


def question_of(prompt: Prompt, data: DataSpec) -> str:
    """Return a plain prompt as it is, and a chat as its messages one after the other."""
    found = prompt_of(prompt, data)
    if isinstance(found, list) and all(isinstance(message, dict) for message in found):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in found)
    return "" if found is None else str(found)


def prompts_file(folder: Path, purpose: Purpose) -> Path:
    return folder / "data" / f"{purpose}.jsonl"


class Prompts:
    """A job's prompts in a file, read by index."""

    _decoder = msgspec.json.Decoder(Prompt)

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._offsets = [0]
        for line in self._file:
            self._offsets.append(self._offsets[-1] + len(line))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: PromptIndex) -> Prompt:
        self._file.seek(self._offsets[index])
        length = self._offsets[index + 1] - self._offsets[index]
        return self._decoder.decode(self._file.read(length))

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def write(path: Path, prompts: Iterable[Prompt]) -> int:
        path.parent.mkdir(parents=True, exist_ok=True)
        encoder = msgspec.json.Encoder()
        count = 0
        with open(path, "wb") as file:
            for prompt in prompts:
                file.write(encoder.encode(prompt) + b"\n")
                count += 1
        return count
