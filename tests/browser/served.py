"""`tlt dashboard` in a process of its own."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Served(NamedTuple):
    address: str
    process: "subprocess.Popen[str]"

    @property
    def root(self) -> str:
        return self.address.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(self.root.rpartition(":")[2])


def start(folder: Path, port: int = 0) -> Served:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "cli.main", "dashboard"),
            *("--run", str(folder), "--port", str(port), "--token", "t"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return Served(process.stdout.readline().split()[-1], process)


def stop(server: Served) -> None:
    server.process.terminate()
    server.process.wait(20)
    assert server.process.stdout is not None
    server.process.stdout.close()


@contextlib.contextmanager
def serve_folder(folder: Path) -> Iterator[Served]:
    server = start(folder)
    try:
        yield server
    finally:
        stop(server)
