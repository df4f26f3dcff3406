"""Two hosts on one machine: each has its own network, `/dev/shm` and core."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_START = (
    "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && echo up && exec sleep infinity"
)
# another one for another run of the tests
_NETWORK = f"10.213.{os.getpid() % 250}"


def complaint() -> str | None:
    """Say what this machine lacks, if it can't have namespaces."""
    for program in ("ip", "nsenter", "unshare"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() or None if tried.returncode else None


class Host:
    """A network namespace and a mount namespace, which live as long as a process that sleeps."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"{_NETWORK}.{number}"
        self.link = f"tlt{os.getpid() % 100000}h{number}"
        self.folder = folder
        folder.mkdir(mode=0o700)
        self._started: list[subprocess.Popen[bytes]] = []
        # of all that runs on this host
        self.environment = {
            **os.environ,
            "HOME": str(folder),
            "TMPDIR": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        cores = sorted(os.sched_getaffinity(0))
        self._core = cores[number % len(cores)]
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-c", _START],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            assert said.readline() == "up\n"

    def enter(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one on this host."""
        target = ["nsenter", "--target", str(self._holder.pid), "--net", "--mount"]
        return ["taskset", "--cpu-list", str(self._core), *target, *command]

    def run(self, *command: str, seconds: float = 120.0) -> str:
        """Run a command to its end, and return what it printed."""
        done = subprocess.run(
            self.enter(command),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Start a command that ends with `close`."""
        with open(log, "ab") as output:
            process = subprocess.Popen(
                self.enter(command), env=self.environment, stdout=output, stderr=output
            )
        self._started.append(process)
        return process

    def connect(self) -> None:
        """Connect the host to the others."""
        _ip("link", "set", self.link, "up")

    def cut_off(self) -> None:
        """Let no packet to or from the host through."""
        _ip("link", "set", self.link, "down")

    def attach(self, bridge: str) -> None:
        """Give the host its address on the bridge."""
        pid = str(self._holder.pid)
        _ip("link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", self.link, "master", bridge)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        for interface in ("lo", "eth0"):
            self.run("ip", "link", "set", interface, "up")
        self.connect()

    def processes(self) -> list[int]:
        """Return the processes that run on this host, but for the one that holds it."""
        own = os.readlink(f"/proc/{self._holder.pid}/ns/net")
        found: list[int] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns/net") == own and int(entry.name) != self._holder.pid:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def files(self, folder: Path | str) -> list[str]:
        """Return the names of the files in a folder, as this host sees it."""
        return self.run("ls", "-A", str(folder)).split()

    def end_processes(self) -> None:
        """Kill all processes of the host."""
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the host and all that runs on it."""
        self.end_processes()
        self._holder.kill()
        for process in (*self._started, self._holder):
            process.wait()


@contextmanager
def two_hosts(folder: Path) -> Generator[tuple[Host, Host]]:
    """Yield two connected hosts; all that runs on them ends with them."""
    bridge = f"tlt{os.getpid() % 100000}b"
    _ip("link", "add", bridge, "type", "bridge")
    hosts: list[Host] = []
    try:
        _ip("link", "set", bridge, "up")
        # this process can reach the hosts, too
        _ip("address", "add", f"{_NETWORK}.254/24", "dev", bridge)
        for number in (1, 2):
            hosts.append(Host(number, folder / f"host{number}"))
            hosts[-1].attach(bridge)
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            host.close()
        _ip("link", "delete", bridge)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
