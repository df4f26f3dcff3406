"""A process outlives a log that can't be written."""

import subprocess
import sys
from pathlib import Path

_PROCESS = """
import sys
from pathlib import Path
import structlog
from tlt.base.json_logs import serve_runs, write_logs_to
folder = Path(sys.argv[1])
write_logs_to(folder / "session", "worker")
serve_runs([folder / "full", folder / "beside"])
log = structlog.get_logger("worker")
log.info("lost in one run's log")
serve_runs([folder / "other"])
log.info("kept")
"""


def test_goes_on_after_the_disk_of_a_runs_log_was_full(tmp_path: Path) -> None:
    full = tmp_path / "full" / "logs" / "worker.jsonl"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    subprocess.run([sys.executable, "-c", _PROCESS, str(tmp_path)], check=True)
    assert '"kept"' in (tmp_path / "session" / "worker.jsonl").read_text()
    assert "one run's log" in (tmp_path / "beside" / "logs" / "worker.jsonl").read_text()
    assert '"kept"' in (tmp_path / "other" / "logs" / "worker.jsonl").read_text()
