"""Find out how much memory of this host may still be taken."""

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Return the bytes that are available, within the limit of a container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
