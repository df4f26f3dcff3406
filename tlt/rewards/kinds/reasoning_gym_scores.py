"""Score answers as reasoning-gym does: by `score_answer` of the row's task, with partial credit.

Some of its tasks evaluate an answer as Python, so it runs in the sandbox for programs.
"""

from typing import Any

import msgspec

from tlt.data.dataset import Row
from tlt.data.reasoning_gym_tasks import MADE_BY, MadeBy, entry_of, import_gym, open_dataset
from tlt.errors import ConfigError, DataError
from tlt.spec.data_and_algorithm import GYM

_KIND = "reward.kind reasoning_gym"


def load_gym() -> None:
    """Import it before processes fork: it has over a hundred tasks."""
    try:
        import_gym(_KIND)
    except DataError as error:
        raise ConfigError(str(error)) from error


def score_answer(text: str, answer: Any, row: Row, /) -> float:
    dataset, entry = _dataset_and_entry(row)
    return dataset.score_answer(stated_answer(text), entry)


def stated_answer(text: str) -> str:
    """Return what stands between the last `<answer>` tags, or the whole text without them."""
    from reasoning_gym.utils import extract_answer

    found = extract_answer(text)
    return text.strip() if found is None else found


def _dataset_and_entry(row: Row) -> tuple[Any, dict[str, Any]]:
    """Return a row as it was made, if that can be repeated: JSON has no tuples, on which some look.

    A few tasks make other rows in another process; theirs are scored as the data has them.
    """
    if MADE_BY in row:
        made_by = msgspec.convert(row[MADE_BY], MadeBy)
        entry = entry_of(made_by.source, made_by.index)
        same = entry["question"] == row["question"]
        return open_dataset(made_by.source), entry if same else row
    task = (row.get("metadata") or {}).get("source_dataset")
    if task is None:
        raise DataError(
            f"{_KIND}: the row has no metadata.source_dataset: it scores rows that reasoning-gym "
            f"has made, such as those of data.train: {GYM}chain_sum?seed=1"
        )
    return open_dataset(f"{GYM}{task}?seed=0"), row
