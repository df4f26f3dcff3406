"""Run a reward in processes that may be killed.

Started with `-m` and a descriptor. It limits itself, loads the reward once, and forks a child for
each byte that arrives; the child's socket and a handle to kill it go back. A child scores one list
of answers after the other.
"""

import math
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from tlt.errors import ConfigError, IsolationError
from tlt.rewards.isolation import (
    devices,
    end_others,
    enter_namespaces,
    fork_apart,
    limit_resources,
    namespaces_work,
    readable_system,
)
from tlt.rewards.landlock import has_landlock, restrict_files
from tlt.rewards.process.request_scorer import RequestScorer, load_scorer
from tlt.rewards.reward_messages import (
    LENGTH,
    BatchScores,
    ScoreBatch,
    Start,
    Started,
    framed,
)
from tlt.spec.reward import SANDBOXED, RewardSpec

_NO_NAMESPACES = "the host allows no user namespaces, which limit network and processes"
_NO_LANDLOCK = "the kernel has no Landlock, which limits files"


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    start = msgspec.json.decode(_read(control), type=Start)
    isolated, lacks = _isolate(start)
    try:
        if lacks:
            _refuse_unconfined(start.reward, "; ".join(lacks))
        scorer = load_scorer(start.reward)
    except ConfigError as error:
        control.sendall(framed(Started(error=str(error))))
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    started = Started(wanted=scorer.wanted, batched=scorer.batched, lacks=tuple(lacks))
    control.sendall(framed(started))
    while control.recv(1):
        _fork_child(control, scorer, start, isolated)


def _isolate(start: Start) -> tuple[bool, list[str]]:
    """Limit network and memory; return if there are namespaces, and which limits the host lacks."""
    reward, lacks = start.reward, list[str]()
    network = _uses_network(reward)
    isolated = namespaces_work(network)
    if isolated:
        enter_namespaces(network)
    else:
        lacks.append(_NO_NAMESPACES)
    os.chdir(start.folder)
    os.environ |= {"TMPDIR": start.folder}
    limit_resources(math.inf if reward.kind == "model" else reward.memory_gb)
    if not has_landlock():
        lacks.append(_NO_LANDLOCK)
    return isolated, lacks


def _refuse_unconfined(reward: RewardSpec, lacks: str) -> None:
    """Raise ConfigError for programs, and for a function unless the spec lets it run like that."""
    if reward.kind in SANDBOXED:
        raise ConfigError(f"reward.kind {reward.kind} runs in a sandbox only: {lacks}")
    if reward.kind == "function" and reward.isolation == "required":
        raise ConfigError(
            f"reward.isolation: {lacks}; to run the function with the limits that are left, "
            "set it to 'available'"
        )


def _uses_network(reward: RewardSpec) -> bool:
    return reward.kind == "url" or (reward.network and reward.kind not in SANDBOXED)


def _fork_child(
    control: socket.socket, scorer: RequestScorer, start: Start, isolated: bool
) -> None:
    ours, theirs = socket.socketpair()
    try:
        child = fork_apart(isolated, _uses_network(start.reward))
    except (IsolationError, OSError) as error:
        print(f"no child: {error}", file=sys.stderr)
        sys.exit(1)
    if not child:
        control.close()
        ours.close()
        _serve(theirs, scorer, start)
    with ours, theirs:
        handle = os.pidfd_open(child)
        try:
            # in a namespace all that the child starts ends with it; elsewhere its group is killed
            group = LENGTH.pack(0 if isolated else child)
            socket.send_fds(control, [group], [ours.fileno(), handle])
        finally:
            os.close(handle)


def _serve(link: socket.socket, scorer: RequestScorer, start: Start) -> None:
    """Score until the link is closed, and end without anything that the parent registered."""
    status, own = 1, os.getpid()
    try:
        # subprocesses of a verifier are waited for
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # the first process of a namespace can be ended by what it handles alone
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if has_landlock():
            _limit_files(start)
        decoder = msgspec.json.Decoder(ScoreBatch)
        while body := _read(link):
            batch = decoder.decode(body)
            results = scorer.score(batch.requests)
            if os.getpid() != own:
                break  # a copy that user code has forked answers nobody
            link.sendall(framed(BatchScores(number=batch.number, results=results)))
            end_others()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _limit_files(start: Start) -> None:
    """Allow writing to its own folder and to the spec's; code of a model reads no files of ours."""
    sandboxed = start.reward.kind in SANDBOXED
    readable = (*readable_system(), str(Path(__file__).parents[2])) if sandboxed else None
    restrict_files((start.folder, *start.reward.writable, *devices()), readable)


def _read(link: socket.socket) -> bytes:
    head = _read_exactly(link, LENGTH.size)
    return _read_exactly(link, LENGTH.unpack(head)[0]) if head else b""


def _read_exactly(link: socket.socket, count: int) -> bytes:
    parts: list[Any] = []
    while count > 0:
        part = link.recv(min(count, 1 << 20))
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
