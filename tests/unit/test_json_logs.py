"""A process outlives a log that can't be written."""

import subprocess
import sys
from pathlib import Path

_PROCESS = """
import sys
from pathlib import Path
import structlog
from tlt.json_logs import serve_run, write_logs_to
folder = Path(sys.argv[1])
write_logs_to(folder / "session", "worker")
serve_run(folder / "full")
log = structlog.get_logger("worker")
log.info("lost in the run's log")
serve_run(None)
serve_run(folder / "other")
log.info("kept")
"""


def test_goes_on_after_the_disk_of_a_runs_log_was_full(tmp_path: Path) -> None:
    full = tmp_path / "full" / "logs" / "worker.jsonl"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    subprocess.run([sys.executable, "-c", _PROCESS, str(tmp_path)], check=True)
    assert '"kept"' in (tmp_path / "session" / "worker.jsonl").read_text()
    assert '"kept"' in (tmp_path / "other" / "logs" / "worker.jsonl").read_text()
