"""A run's summary has two possible writers: the coordinator's process and `tlt submit --wait`."""

from pathlib import Path

import pytest

from tlt.runs.run_summary_files import replacement_of


def test_allows_two_writers_of_one_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    with replacement_of(file) as first:
        first.write_text("first")
        with replacement_of(file) as second:
            second.write_text("second")
        assert file.read_text() == "second"
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_leaves_the_old_file_when_writing_fails(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text("old")
    with pytest.raises(TypeError), replacement_of(file) as unfinished:
        unfinished.write_bytes("not bytes")  # pyright: ignore[reportArgumentType]
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
