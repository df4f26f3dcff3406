"""Logs stay bounded while the processes that write them hold them open."""

from pathlib import Path

from tlt.base.log_rotation import KEPT, bound_logs

_MOST = 100


def test_keeps_the_last_parts_of_a_log_that_is_held_open(tmp_path: Path) -> None:
    with open(tmp_path / "w0-rank0.log", "ab", buffering=0) as log:
        for part in range(6):
            log.write(b"%d" % part * (_MOST + 1))
            bound_logs(tmp_path, _MOST)
            assert (tmp_path / "w0-rank0.log").stat().st_size == 0
        log.write(b"newest")
    assert {file.name: file.read_bytes()[:6] for file in tmp_path.iterdir()} == {
        "w0-rank0.log": b"newest",
        "w0-rank0.log.1": b"555555",
        "w0-rank0.log.2": b"444444",
    }
    assert KEPT == 3


def test_leaves_small_logs_and_other_files_alone(tmp_path: Path) -> None:
    sizes = {"supervisor.jsonl": _MOST, "journal.msgpack": 3 * _MOST, "ray.out.1": 3 * _MOST}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    (tmp_path / "ray-ended.log").mkdir()
    bound_logs(tmp_path, _MOST)
    found = {file.name: file.stat().st_size for file in tmp_path.iterdir() if file.is_file()}
    assert found == sizes


def test_accepts_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    bound_logs(tmp_path / "logs", _MOST)
