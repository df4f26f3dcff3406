"""Run ranks in the test's own process, and read what they send."""

import os
import socket
import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.samples import JOB, SPEC
from tests.session import write_policy
from tlt.base.id_types import Epoch, Incarnation, WorkerId
from tlt.protocol.commands import OpenJob
from tlt.protocol.rank_messages import FromRank, RankSetup, ToRank
from tlt.ranks.main import Rank
from tlt.ranks.rank_job_context import RankJob
from tlt.ranks.worker_channel import Progress, RankChannel, pack
from tlt.spec.config import JobSpec, PolicySpec

WORKER, INCARNATION = WorkerId("worker-1"), Incarnation(1)
_LENGTH = struct.Struct("<Q")


def rank_setup(folder: Path, rank: int = 0, device: str = "cpu") -> RankSetup:
    """Return the setup of a rank whose jobs have their folders in this one."""
    return RankSetup(
        worker=WORKER,
        incarnation=INCARNATION,
        rank=rank,
        device=device,
        host="127.0.0.1",
        flight=str(folder),
    )


def open_job(folder: Path, spec: JobSpec = SPEC) -> OpenJob:
    """Return the command that opens the job, with its run in this folder."""
    return OpenJob(
        worker=WORKER,
        incarnation=INCARNATION,
        job=JOB,
        epoch=Epoch(1),
        spec=spec,
        folder=str(folder),
    )


def with_policy(folder: Path, **parts: msgspec.Struct) -> JobSpec:
    """Return a spec with a tiny policy, which is written into the folder."""
    policy = write_policy(folder / "policy", layers=1)
    return msgspec.structs.replace(SPEC, policy=PolicySpec(path=str(policy)), **parts)


def rank_job(folder: Path, spec: JobSpec = SPEC, rank: int = 0) -> RankJob:
    """Return the job as that rank sees it."""
    return RankJob(rank_setup(folder, rank), open_job(folder, spec))


@contextmanager
def shared_progress() -> Generator[Progress]:
    """Yield the counters that a rank shares with its worker."""
    memory = os.memfd_create("progress")
    os.ftruncate(memory, Progress.SIZE)
    yield Progress(memory)
    os.close(memory)


class LocalRank:
    """A rank and the worker's end of its socket."""

    def __init__(self, rank: Rank, worker_end: socket.socket) -> None:
        self.rank = rank
        self._worker_end = worker_end
        self._decoder = msgspec.msgpack.Decoder(FromRank)

    def send(self, message: ToRank) -> None:
        """Send a message that the rank's loop will receive."""
        self._worker_end.sendall(pack(message))

    def end(self) -> None:
        """Let the rank's loop end after the messages so far."""
        self._worker_end.shutdown(socket.SHUT_WR)

    def sent(self) -> list[FromRank]:
        """Return what the rank has sent since the last call."""
        messages: list[FromRank] = []
        self._worker_end.setblocking(False)
        while True:
            try:
                header = self._worker_end.recv(_LENGTH.size)
            except BlockingIOError:
                return messages
            (length,) = _LENGTH.unpack(header)
            body = b""
            while len(body) < length:
                body += self._worker_end.recv(length - len(body))
            messages.append(self._decoder.decode(body))


@contextmanager
def local_rank(folder: Path, rank: int = 0, device: str = "cpu") -> Generator[LocalRank]:
    """Yield a rank without a job."""
    ours, theirs = socket.socketpair()
    channel = RankChannel(ours.detach())
    with shared_progress() as progress:
        yield LocalRank(Rank(rank_setup(folder, rank, device), channel, progress), theirs)
    channel.close()
    theirs.close()
