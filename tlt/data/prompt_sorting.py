"""Sort prompts by a column of their rows."""

from collections.abc import Iterable

from tlt.data.columns import require_column
from tlt.data.dataset import Prompt
from tlt.errors import DataError
from tlt.spec.prompt_files import Column


def sort_prompts(prompts: Iterable[Prompt], path: str, name: str) -> list[Prompt]:
    """Raise DataError if a row lacks the column, or if its values can't be compared."""
    column = Column(name, "data.order_by")
    try:
        return sorted(prompts, key=lambda each: require_column(each.row, column, path))
    except TypeError as error:
        raise DataError(
            f"{path}: values of '{name}' ({column.key}) can't be compared: {error}"
        ) from error
