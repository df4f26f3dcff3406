"""Preparing a job: in a process of its own, because it loads a tokenizer and runs users' code."""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from tlt.config import JobSpec
from tlt.dataset import Prepared
from tlt.messages import JobPrepared, JobRefused
from tlt.processes import ends_with_parent
from tlt.types import JobId

SPEC_FILE = "spec.json"


async def prepare(job: JobId, spec: JobSpec, folder: Path) -> JobPrepared | JobRefused:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SPEC_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
    except OSError as error:
        return JobRefused(job=job, error=f"{folder}: cannot be written: {error.strerror}")
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tlt.prepare", str(folder)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=ends_with_parent(signal.SIGKILL),
    )
    try:
        output, complaint = await child.communicate()
    finally:
        if child.returncode is None:  # cancelled: a user's module may never end its import
            child.kill()
    try:
        prepared = msgspec.json.decode(output, type=Prepared)
    except msgspec.DecodeError:
        lines = complaint.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        return JobRefused(job=job, error=f"preparing ended with {child.returncode}: {lines[-1]}")
    if prepared.error is not None:
        return JobRefused(job=job, error=prepared.error)
    return JobPrepared(
        job=job, train_prompts=prepared.train_prompts, eval_prompts=prepared.eval_prompts
    )
