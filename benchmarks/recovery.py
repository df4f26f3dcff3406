"""Kill each process of a session in the middle of a job, and time its recovery.

`python -m benchmarks.recovery --out F.json [--rounds N]`

Two workers of one rank decode. Recovery ends when every process of the session is up again; after
the death of the supervisor or of everything it begins with `tlt up`. An answer is lost or doubled
if a finished step counts another number of different answers than it has.
"""

import argparse
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.result import Claim, write_result
from benchmarks.stacks import SPEC, session, submit, tlt
from tests.e2e.live import counted_rollouts
from tlt.base.end_session_processes import ProcessId, identify, is_running
from tlt.errors import NoSession, StoreError
from tlt.protocol.events import RolloutFinished
from tlt.runs.run_folder_reader import journal_entries, open_ledger, read_snapshot, read_spec
from tlt.session.client import Client, with_client
from tlt.session.control import find_session
from tlt.session.fault_log import read_supervised
from tlt.session.session_process_states import Liveness, actor_liveness, supervised_liveness

_POLL_SECONDS, _MOST_SECONDS = 0.1, 300.0
_RAY = ("Ray's driver", "Ray's raylet", "Ray's GCS")
# for the whole head; anything else is quicker
_BAR_SECONDS = 30.0

Processes = Mapping[str, Liveness]
_FAULTS: dict[str, Callable[[Processes], list[int]]] = {
    "a rank": lambda up: list(up["w0"].rank_pids),
    "a worker": lambda up: _pids(up, "w0"),
    "the coordinator": lambda up: _pids(up, "coordinator"),
    "the reward scorer": lambda up: _pids(up, "reward"),
    "Redis": lambda up: _pids(up, "Redis"),
    "Ray's raylet": lambda up: _pids(up, "Ray's raylet"),
    "Ray's GCS": lambda up: _pids(up, "Ray's GCS"),
    "Ray's driver": lambda up: _pids(up, "Ray's driver"),
    "all of Ray's head": lambda up: _pids(up, *_RAY),
    "the supervisor, then `tlt up`": lambda up: _pids(up, "supervisor"),
    "everything, then `tlt up`": lambda up: [
        *_pids(up, *up),
        *(pid for process in up.values() for pid in process.rank_pids),
    ],
}


class Recovery(NamedTuple):
    # until all processes were up again
    seconds: float
    # until the next answer was finished
    without_answers: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    began = time.monotonic()
    recoveries: dict[str, list[Recovery]] = {fault: [] for fault in _FAULTS}
    with session():
        job, folder = submit("off", 1, "algorithm.steps=100000")
        for _ in range(arguments.rounds):
            for fault in _FAULTS:
                recoveries[fault].append(_recover(fault, folder))
                print(f"{fault}: {recoveries[fault][-1]}", flush=True)
        tlt("cancel", job)
        wrong = _wrong_answers(folder)
    claims = [
        Claim(
            name=f"recovery.{fault}",
            value=max(each.seconds for each in recoveries[fault]),
            unit="s",
            bar=_BAR_SECONDS,
            less_is_better=True,
        )
        for fault in _FAULTS
    ]
    claims.append(
        Claim(
            name="recovery.answers.lost_or_doubled",
            value=wrong,
            unit="answers",
            bar=0,
            less_is_better=True,
        )
    )
    details: dict[str, Any] = {
        "recoveries": {
            fault: [each._asdict() for each in found] for fault, found in recoveries.items()
        },
        "spec": SPEC.name,
        "load": os.getloadavg()[2],
    }
    write_result("recovery", claims, details, time.monotonic() - began, arguments.out)


def _recover(fault: str, folder: Path) -> Recovery:
    up = _await_all_up(killed=[])
    _await_answer(folder, time.time())
    killed = [found for pid in _FAULTS[fault](up) if (found := identify(pid)) is not None]
    at = time.time()
    for process in killed:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    if "tlt up" in fault:
        while any(map(is_running, killed)):
            time.sleep(_POLL_SECONDS)
        at = time.time()
        tlt("up", "--workers", "2", "--runs", str(folder.parent))
    _await_all_up(killed)
    seconds = time.time() - at
    answered = _await_answer(folder, at)
    return Recovery(round(seconds, 1), round(answered - at, 1))


def _await_all_up(killed: list[ProcessId]) -> Processes:
    gone = {process.pid for process in killed}
    deadline = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(NoSession, StoreError):
            up = _processes()
            pids = {process.pid for process in up.values()}
            pids |= {pid for process in up.values() for pid in process.rank_pids}
            if all(process.state == "up" for process in up.values()) and not pids & gone:
                return up
        time.sleep(_POLL_SECONDS)
    raise SystemExit(f"not all processes are up after {_MOST_SECONDS:.0f} s: {_processes()}")


def _processes() -> Processes:
    spec = find_session("default")
    supervised = read_supervised(Path(spec.folder))

    async def fetch(client: Client) -> list[Liveness]:
        services, workers = await client.services(), await client.workers()
        return list(actor_liveness(spec, services, workers, supervised, time.time()))

    found = [*supervised_liveness(supervised), *with_client("default", fetch)]
    return {process.name: process for process in found}


def _await_answer(folder: Path, since: float) -> float:
    """Return when the first answer after a moment was finished."""
    while True:
        if (folder / "journal.jsonl").exists():
            for entry in journal_entries(folder):
                if entry.at > since and isinstance(entry.event, RolloutFinished):
                    return entry.at
        time.sleep(_POLL_SECONDS)


def _wrong_answers(folder: Path) -> int:
    """Count the answers that finished steps lack, or have twice."""
    spec = read_spec(folder)
    expected = spec.algorithm.prompts_per_step * spec.algorithm.group_size
    counted = counted_rollouts(list(journal_entries(folder)), open_ledger(folder))
    different = Counter(step for step, _, _ in set(counted))
    doubled = len(counted) - len(set(counted))
    finished = len(read_snapshot(folder).steps)
    return doubled + sum(abs(expected - different[step]) for step in range(finished))


def _pids(up: Processes, *names: str) -> list[int]:
    return [pid for name in names if (pid := up[name].pid) is not None]


if __name__ == "__main__":
    main()
