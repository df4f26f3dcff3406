"""Measure what grows with a run's length: its journal, a coordinator's state, readers' memory.

`python -m benchmarks.long_run --out F.json`

Eight simulated workers write 64 answers a step. Growth is measured in the second half.
"""

import argparse
import multiprocessing
import tempfile
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks.dashboard_world import World, big_spec
from benchmarks.result import Claim, write_result
from tlt.config import JobSpec
from tlt.dashboard.run_fold import Run
from tlt.id_types import JobId
from tlt.policies import coordinator
from tlt.policies.job.run_state import RunState
from tlt.protocol.commands import EndJob
from tlt.protocol.events import JobPrepared, JobSubmitted
from tlt.protocol.refs import SCHEMA_VERSION
from tlt.protocol.shared_values import JobRecord, Prepared
from tlt.report import Ledger
from tlt.store.job_records import new_record
from tlt.store.journal import FILE_NAME, JournalEntry, Position, digest, follow
from tlt.store.journal_replayed_state import SNAPSHOT_ENTRIES, replay

_JOB = JobId("big-1")
_WORKERS, _PROMPTS, _GROUP = 8, 16, 4
_ENTRIES, _BATCH = 160_000, 500
_RECORDS = 1000
_READ_SECONDS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    began = time.monotonic()
    spec = big_spec(_PROMPTS, _GROUP)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / _JOB
        folder.mkdir()
        world = World(_JOB, folder, _WORKERS, spec)
        halfway, half_bytes = _written(world), world.journal.position.bytes
        whole, whole_bytes = _written(world), world.journal.position.bytes
        steps = whole.step - halfway.step
        replayed = _replay_seconds(folder, spec)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
            ledger = other.submit(_ledger, folder, spec).result()
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
            page = other.submit(_page, folder, spec).result()
    journal = (whole_bytes - half_bytes) / steps
    state = (_state_bytes(whole) - _state_bytes(halfway)) / steps
    found = {
        "journal": (journal / (_PROMPTS * _GROUP), "bytes an answer", 2000),
        "replay_after_snapshot": (replayed, "s", 1),
        "coordinator_state": (state, "bytes a step", 10),
        "ledger": (1000 * (ledger[1] - ledger[0]) / steps, "MB in 1,000 steps", 50),
        "page": (1000 * (page[1] - page[0]) / steps, "MB in 1,000 steps", 100),
        "job_in_redis": (_record_bytes(spec), "bytes a job", 10_000),
        "job_in_coordinator": (_object_bytes(spec), "bytes a job", 10_000),
        "job_in_session_journal": (_session_bytes(spec), "bytes a job", 10_000),
    }
    claims = [
        Claim(
            name=f"long_run.{name}", value=round(value, 3), unit=unit, bar=bar, less_is_better=True
        )
        for name, (value, unit, bar) in found.items()
    ]
    details = {
        "steps": int(whole.step),
        "journal_megabytes": round(whole_bytes / 1e6, 1),
        "ledger_megabytes": ledger[1],
        "page_megabytes": page[1],
    }
    write_result("long_run", claims, details, time.monotonic() - began, out)


def _written(world: World) -> RunState:
    for _ in range(_ENTRIES // 2 // _BATCH):
        world.write(_BATCH)
    return world.state


def _state_bytes(state: RunState) -> int:
    """Leave out the plans of updates, which a checkpoint ends: this world has none."""
    policy = msgspec.structs.replace(state.policy, plans={})
    return len(msgspec.msgpack.encode(msgspec.structs.replace(state, policy=policy)))


def _replay_seconds(folder: Path, spec: JobSpec) -> float:
    """Return the time for as many entries as follow a snapshot at most."""
    state, start, journal = coordinator.new_run(_JOB, spec), Position(), folder / FILE_NAME
    began = time.process_time()
    _, end = replay(journal, state, coordinator.decide, start)
    return (time.process_time() - began) * SNAPSHOT_ENTRIES / end.entries


# --- readers, each in a process of its own: the megabytes that it has halfway, and in the end


def _ledger(folder: Path, spec: JobSpec) -> tuple[float, float]:
    ledger, began, halfway = Ledger(_JOB, spec), _anonymous(), 0.0
    for entry, after in follow(folder / FILE_NAME):
        ledger.add(entry.event, entry.at)
        if after.entries == _ENTRIES // 2:
            halfway = _anonymous()
    return round(halfway - began, 1), round(_anonymous() - began, 1)


def _page(folder: Path, spec: JobSpec) -> tuple[float, float]:
    run, began, halfway = Run(folder, spec), _anonymous(), 0.0
    while run.advance(_READ_SECONDS):
        run.discard_pending()
        if not halfway and run.position.entries >= _ENTRIES // 2:
            halfway = _anonymous()
    return round(halfway - began, 1), round(_anonymous() - began, 1)


def _anonymous() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(kilobytes) * 1024 / 1e6


# --- what an ended job leaves in a session


def _record_bytes(spec: JobSpec) -> int:
    return len(msgspec.json.encode(new_record(_JOB, spec, "/runs/big-1")))


def _object_bytes(spec: JobSpec) -> float:
    raw = msgspec.json.encode(new_record(_JOB, spec, "/runs/big-1"))
    tracemalloc.start()
    records = [msgspec.json.decode(raw, type=JobRecord) for _ in range(_RECORDS)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(records)


def _session_bytes(spec: JobSpec) -> int:
    events = (
        JobSubmitted(job=_JOB, spec=spec, folder="/runs/big-1"),
        JobPrepared(job=_JOB, prepared=Prepared(train_prompts=7000, eval_prompts=300)),
        EndJob(job=_JOB, status="done", error=None),
    )
    entries = [
        JournalEntry(
            seq=number, schema=SCHEMA_VERSION, at=time.time(), event=event, commands=digest(())
        )
        for number, event in enumerate(events)
    ]
    return sum(len(msgspec.json.encode(entry)) for entry in entries)


if __name__ == "__main__":
    main()
