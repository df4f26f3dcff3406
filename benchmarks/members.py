"""Three workers that train the drafter together, against one that trains it alone.

`python -m benchmarks.members --out F.json`

One worker takes all answers of a step, the others train; the policy stands still, so that drafters
can be compared. Both jobs begin with the same half-trained drafter. Every drafter that was adopted
is measured on held-out answers: what it gained by as many micro-batches of all members together.
Then, in a third job, one that trains is killed, and another is called to decode in the place of one
that was killed while it decoded.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine import MODEL
from benchmarks.result import Claim, write_result
from benchmarks.speculating import accept_length
from benchmarks.stacks import SPEC, run, session, submit, tlt, wait
from cli.client import with_client
from cli.drafter_export import read_drafter
from cli.following import entries, folded
from tlt.config import load_job_spec
from tlt.messages import (
    AnyEvent,
    DrafterLearned,
    DrafterPreempted,
    DrafterTrained,
    WorkerLost,
)
from tlt.models.drafter_folder import load_drafter
from tlt.models.folder import load_decoder
from tlt.policies.drafting import adopts
from tlt.policies.run_state import Duty, RunState
from tlt.types import Incarnation, WorkerId

_HALF_TOKENS = 60_000
_STEPS_ALONE, _STEPS_TOGETHER, _STEPS_FAULTED = 14, 8, 4
_MEMBERS = 3
# one worker has room for all answers of a step, and the policy stands still
_ONE_DECODES = (
    "algorithm.prompts_per_step=2",
    "rollout.slots=32",
    "algorithm.learning_rate=1e-12",
)
_DEPTH = 4
_POLL_SECONDS, _PATIENCE_SECONDS = 0.05, 300.0


class Point(NamedTuple):
    # of all members, merged
    micro_batches: int
    accept_length: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as name:
        half = Path(name) / "half"
        _half_trained(half)
        layers = load_decoder(MODEL, torch.float32).config.layers
        first = Point(0, accept_length(load_drafter(half, layers), _DEPTH))
        settings = (*_ONE_DECODES, f"drafter.path={half}")
        with session(workers=2):
            alone = [first, *_curve(f"algorithm.steps={_STEPS_ALONE}", *settings)]
        with session(workers=1 + _MEMBERS):
            together = [first, *_curve(f"algorithm.steps={_STEPS_TOGETHER}", *settings)]
            faults = _Faulted(settings).told()
    total = min(alone[-1].micro_batches, together[-1].micro_batches)
    gained = [_at(curve, total) - first.accept_length for curve in (alone, together)]
    less = {"less_is_better": True}
    claims = [
        Claim(name="members.gain_alone", value=gained[0], unit="tokens a pass", bar=0.2),
        Claim(name="members.share_of_gain", value=gained[1] / gained[0], unit="", bar=0.8),
        Claim(name="members.lost", value=faults["lost"], unit="micro-batches", bar=1, **less),
        Claim(name="members.left_out", value=faults["left_out"], unit="deltas", bar=0, **less),
    ]
    details = {
        "micro_batches": total,
        "depth": _DEPTH,
        "alone": [point._asdict() for point in alone],
        "together": [point._asdict() for point in together],
        "faults": faults,
    }
    write_result("members", claims, details, time.monotonic() - began, out)


def _half_trained(folder: Path) -> None:
    prompts = str(load_job_spec(SPEC).data.train)
    sources = ("--policy", str(MODEL), "--prompts", prompts, "--samples", "128")
    tlt("drafter", "train", *sources, "--tokens", str(_HALF_TOKENS), "--out", str(folder))


def _curve(*settings: str) -> list[Point]:
    """Of the drafters that were adopted, in their order."""
    job = run("forced", 1, *settings)
    spec = folded(job.folder).spec
    events = [entry.event for entry in entries(job.folder)]
    merged = [e for e in events if isinstance(e, DrafterTrained) and adopts(e.canary)]
    return [
        Point(e.trunk.lessons, accept_length(read_drafter(job.folder, spec, e.drafter), _DEPTH))
        for e in merged
    ]


def _at(curve: Sequence[Point], micro_batches: int) -> float:
    """Between two points, on the line between them."""
    before = max(p for p in curve if p.micro_batches <= micro_batches)
    after = min((p for p in curve if p.micro_batches > micro_batches), default=before)
    if after is before:
        return before.accept_length
    part = (micro_batches - before.micro_batches) / (after.micro_batches - before.micro_batches)
    return before.accept_length + part * (after.accept_length - before.accept_length)


class _Faulted:
    """A job in which one that trains is killed, and in a later step the one that decodes."""

    def __init__(self, settings: Sequence[str]) -> None:
        steps = f"algorithm.steps={_STEPS_FAULTED}"
        self._job, self._folder = submit("forced", 1, *settings, steps)
        self._killed: list[str] = []
        self._await_members()
        self._kill(min(self._doing(Duty.DRAFT)))
        step = self._state().step
        self._await(lambda: self._state().step > step)
        self._await_members()
        self._kill(min(self._doing(Duty.ROLLOUT)))
        wait(self._job)

    def told(self) -> dict[str, Any]:
        events = [entry.event for entry in entries(self._folder)]
        learned = [e for e in events if isinstance(e, DrafterLearned)]
        stopped = [e for e in events if isinstance(e, DrafterPreempted)]
        lost = [e.incarnation for e in events if isinstance(e, WorkerLost)]
        longest = {
            who: max(e.longest_seconds for e in learned if e.delta.incarnation == who)
            for who in {e.delta.incarnation for e in learned}
        }
        dropped = [
            (e.dropped_seconds, longest[e.incarnation]) for e in stopped if e.incarnation in longest
        ]
        return {
            "killed": self._killed,
            "lost": max(seconds / most for seconds, most in dropped),
            "left_out": sum(_left_out(events, who) for who in set(longest) - set(lost)),
            "stopped": len(stopped),
            "members": len(longest),
            "micro_batches": sum(e.updates for e in learned),
        }

    def _state(self) -> RunState:
        return folded(self._folder).state

    def _doing(self, duty: Duty) -> list[WorkerId]:
        return [name for name, known in self._state().workers.items() if known.duty is duty]

    def _await_members(self) -> None:
        self._await(lambda: len(self._doing(Duty.DRAFT)) == _MEMBERS)

    def _await(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._job}: what was waited for did not happen")
            time.sleep(_POLL_SECONDS)

    def _kill(self, worker: WorkerId) -> None:
        beats = with_client("default", lambda client: client.workers())
        os.kill(beats[worker].rank_pids[0], signal.SIGKILL)
        self._killed.append(worker)


def _left_out(events: Sequence[AnyEvent], who: Incarnation) -> int:
    """Of the deltas that it had handed in when a merge was asked for: those not in that trunk."""
    left_out = 0
    handed_in: dict[str, int] = {}
    asked: dict[str, int] = {}
    for event in events:
        match event:
            case DrafterLearned() if event.delta.incarnation == who:
                handed_in[event.delta.member] = event.delta.number
            case DrafterTrained():
                merged = {name: number for name, (number, _) in event.trunk.merged.items()}
                left_out += sum(merged.get(name, -1) < number for name, number in asked.items())
                # the next merge is of what is there by now, and may be of more
                asked = dict(handed_in)
            case _:
                pass
    return left_out


if __name__ == "__main__":
    main()
