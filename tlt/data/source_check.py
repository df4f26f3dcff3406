"""Check the sources of rows that name their own: each has a reward, and a reward's names exist."""

from collections.abc import Iterator
from typing import NamedTuple

from tlt.data.columns import lack_of_column, sources_of
from tlt.data.dataset import Row, rows
from tlt.errors import ConfigError, DataError
from tlt.spec.config import JobSpec
from tlt.spec.prompt_files import Column, eval_files, names_in_rows, prompt_files, train_files
from tlt.spec.reward_sources import complain_of_unknown_source, complain_of_unscored


class _SourcedRow(NamedTuple):
    location: str
    row: Row
    names: tuple[str, ...]
    column: Column | None

    @property
    def lacks_column(self) -> bool:
        return self.column is not None and len(self.names) == 1


def check_sources(spec: JobSpec) -> None:
    """Read all rows, those beyond a limit, too, if the spec doesn't name all sources itself."""
    if not names_in_rows(spec.data):
        return
    names = {file.name for file in prompt_files(spec.data)}
    # by the key of the spec: a row that lacks the column, or None if another has it
    lacking: dict[str, _SourcedRow | None] = {}
    for each in _sourced_rows(spec):
        if (complaint := complain_of_unscored(spec.reward, each.names)) is not None:
            has = f", and it has no '{each.column.name}' ({each.column.key})" if each.column else ""
            raise DataError(f"{each.location}: {complaint}{has if each.lacks_column else ''}")
        names.update(each.names)
        if each.column is not None and not each.lacks_column:
            lacking[each.column.key] = None
        elif each.column is not None:
            lacking.setdefault(each.column.key, each)
    if not spec.algorithm.steps:
        return  # training data that isn't read may have the other names, and the column
    for each in filter(None, lacking.values()):
        assert each.column is not None
        raise lack_of_column(each.row, each.column, each.location)
    if (complaint := complain_of_unknown_source(spec.reward, names)) is not None:
        raise ConfigError(complaint)


def _sourced_rows(spec: JobSpec) -> Iterator[_SourcedRow]:
    data, environment = spec.data, spec.environment
    trains = train_files(data, environment) if spec.algorithm.steps else ()
    for file in (*trains, *eval_files(data, environment)):
        for location, row in rows(file):
            yield _SourcedRow(location, row, sources_of(row, file, location), file.source)
