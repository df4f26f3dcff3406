"""A process outlives a log that can't be written."""

from pathlib import Path

import structlog

from tlt.json_logs import serve_run, write_logs_to


def test_goes_on_after_the_disk_of_a_runs_log_was_full(tmp_path: Path) -> None:
    before = structlog.get_config()
    full = tmp_path / "run" / "logs" / "worker.jsonl"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    try:
        write_logs_to(tmp_path / "session", "worker")
        serve_run(tmp_path / "run")
        log = structlog.get_logger("worker")
        log.info("lost in the run's log")
        serve_run(None)
        serve_run(tmp_path / "other")
        log.info("kept")
    finally:
        serve_run(None)
        structlog.configure(**before)
    assert '"kept"' in (tmp_path / "session" / "worker.jsonl").read_text()
    assert '"kept"' in (tmp_path / "other" / "logs" / "worker.jsonl").read_text()
