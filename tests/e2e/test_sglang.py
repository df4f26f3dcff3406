"""A job on SGLang succeeds even if SGLang dies or hangs."""

import contextlib
import signal
from pathlib import Path

import pytest

from tests.e2e.live import Live, count_dropped, counted_rollouts, kill, wait_until
from tlt.run_folder_reader import open_ledger

pytestmark = pytest.mark.timeout(300)


def await_decoding(live: Live, job: str, step: int) -> int:
    """Wait until the scheduler decodes and return its process id."""
    live.await_phase(job, "rolling", step)
    found: list[int] = []
    seen: dict[str, None] = {}

    def decoding() -> bool:
        worker = live.workers()["w0"]
        own = {pid: line for rank in worker.rank_pids for pid, line in children(rank)}
        seen[f"{worker.running} answers, with children {own}"] = None
        if worker.running > 0:
            found.extend(pid for pid, line in own.items() if "sglang" in line)
        return bool(found)

    try:
        wait_until(decoding, "SGLang to decode")
    except AssertionError as error:
        error.add_note("\n".join(seen))
        raise
    return found[0]


def children(parent: int) -> list[tuple[int, str]]:
    """Return the process ids of a process's children with their command lines.

    Reads all of /proc: a thread's own list of children may be incomplete, see proc(5).
    """
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            _, _, rest = (folder / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent:
                line = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append((int(folder.name), line.strip()))
    return found


def test_survives_a_dead_and_a_hung_scheduler(alone: Live, sglang_spec: Path) -> None:
    job = alone.submit(sglang_spec, "workers.stuck_seconds=8")
    kill(await_decoding(alone, job, step=0))
    hung = await_decoding(alone, job, step=1)
    kill(hung, signal.SIGSTOP)
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    journal = alone.journal(job)
    counted = counted_rollouts(journal, open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4
    assert count_dropped(journal) == 0
    assert alone.fold(job).losses == 2
    logs = alone.tlt("logs", job).stdout
    assert "SGLang's scheduler was ended by SIGKILL" in logs
    assert "SGLang stood still for 8 s" in logs


@pytest.mark.thorough
def test_fails_by_name_if_the_scheduler_dies_too_often(alone: Live, sglang_spec: Path) -> None:
    job = alone.submit(sglang_spec, "workers.max_restarts=0")
    kill(await_decoding(alone, job, step=0))
    ended = alone.await_end(job)
    assert ended["status"] == "failed"
    assert "SGLang's scheduler was ended by SIGKILL" in ended["error"]
