"""Compare three workers that train the drafter together with one that trains it alone.

`python -m benchmarks.members --out F.json`

One worker decodes all answers of a step, the others train. The policy is fixed, so that drafters
can be compared, and both jobs of a seed start with the same half-trained drafter. Adopted drafters
are evaluated on held-out answers, and compared after as many micro-batches of all members together.
In another job a training worker is killed, and a decoding one too, so that a training worker has to
stop and take its place; the micro-batches that each drops are counted.
"""

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks.engine import MODEL
from benchmarks.result import Claim, write_result
from benchmarks.speculating import accept_length
from benchmarks.stacks import SPEC, run, session, submit, tlt
from tlt.base.id_types import WorkerId
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.drafter_folder import load_drafter
from tlt.models.eagle_drafter import Drafter
from tlt.policies.run.run_state import Duty, RunState
from tlt.protocol.events import DrafterDeltaReady, DrafterMerged, DrafterTrainingStopped, WorkerLost
from tlt.runs.export.drafter_export import read_drafter
from tlt.runs.run_folder_reader import journal_entries, read_ledger
from tlt.session.client import with_client
from tlt.spec.spec_files import load_job_spec
from tlt.store.journal import FILE_NAME

_Found = TypeVar("_Found")

_HALF_TOKENS = 60_000
_STEPS_ALONE, _STEPS_TOGETHER = 20, 10
# an upper bound: the job is cancelled once it has gone on without the killed workers
_STEPS_FAULTED = 30
_MEMBERS = 3
# seeds; each has its own half-trained drafter, prompts and noise
_SEEDS = (1, 2)
# micro-batches of all members after which gains are compared, and those of the claims
_TOTALS, _CLAIMED = (120, 240, 480, 960), 960
# one worker has slots for all answers, the policy is fixed, and three members see as many
# different prompts in fewer steps as one member does in more
_ONE_DECODES = (
    "algorithm.prompts_per_step=64",
    "algorithm.group_size=2",
    "rollout.slots=128",
    "rollout.spread=false",
    "algorithm.learning_rate=1e-12",
    # all drafters are kept: they are evaluated afterwards
    "drafter.keep_all=true",
)
_DEPTH, _ANSWERS = 4, 256
_POLL_SECONDS, _PATIENCE_SECONDS = 0.05, 300.0


class MergedDrafter(NamedTuple):
    # micro-batches of all members, merged
    micro_batches: int
    drafter: Drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tlt-bench-") as name:
        halves = {seed: _half_trained(Path(name) / f"half-{seed}", seed) for seed in _SEEDS}
        with session(workers=2):
            alone = {seed: _curve(seed, half, _STEPS_ALONE) for seed, half in halves.items()}
        with session(workers=1 + _MEMBERS):
            together = {seed: _curve(seed, half, _STEPS_TOGETHER) for seed, half in halves.items()}
            faults = _FaultInjection(_settings(halves[_SEEDS[0]])).result()
    gains = {
        seed: {total: (alone[seed].gain(total), together[seed].gain(total)) for total in _TOTALS}
        for seed in _SEEDS
    }
    by_one = mean(gains[seed][_CLAIMED][0] for seed in _SEEDS)
    by_all = mean(gains[seed][_CLAIMED][1] for seed in _SEEDS)
    claims = [
        Claim(name="members.gain_alone", value=by_one, unit="tokens a pass", bar=0.2),
        Claim(name="members.share_of_gain", value=by_all / by_one, unit="", bar=0.8),
        Claim(
            name="members.lost",
            value=faults["lost"],
            unit="micro-batches",
            bar=1,
            less_is_better=True,
        ),
    ]
    details = {
        "depth": _DEPTH,
        "answers": _ANSWERS,
        "claimed_after": _CLAIMED,
        "seeds": {
            seed: {
                "before": alone[seed].length(0),
                "gain_after_so_many_micro_batches": {
                    total: {"alone": one, "together": all_, "share": round(all_ / one, 3)}
                    for total, (one, all_) in gains[seed].items()
                },
                "measured": {"alone": alone[seed].measured, "together": together[seed].measured},
            }
            for seed in _SEEDS
        },
        "faults": faults,
    }
    write_result("members", claims, details, time.monotonic() - began, out)


class Curve:
    """Accept lengths by micro-batches; a drafter is evaluated when its value is needed."""

    def __init__(self, made: Sequence[MergedDrafter]) -> None:
        if made[-1].micro_batches < _CLAIMED:
            raise SystemExit(f"no more than {made[-1].micro_batches} micro-batches were merged")
        self._merged = made
        self.measured: dict[int, float] = {}

    def gain(self, micro_batches: int) -> float:
        return self.length(micro_batches) - self.length(0)

    def length(self, micro_batches: int) -> float:
        """Interpolate linearly between two drafters."""
        before = [made for made in self._merged if made.micro_batches <= micro_batches][-1]
        after = next((m for m in self._merged if m.micro_batches > micro_batches), before)
        low, high = self._measure(before), self._measure(after)
        apart = after.micro_batches - before.micro_batches
        part = (micro_batches - before.micro_batches) / apart if apart else 0.0
        return low + part * (high - low)

    def _measure(self, made: MergedDrafter) -> float:
        if made.micro_batches not in self.measured:
            length = accept_length(made.drafter, _DEPTH, _ANSWERS)
            self.measured[made.micro_batches] = length
        return self.measured[made.micro_batches]


def _half_trained(folder: Path, seed: int) -> Path:
    prompts = str(load_job_spec(SPEC).data.train)
    sources = ("--policy", str(MODEL), "--prompts", prompts, "--samples", "128")
    amount = ("--tokens", str(_HALF_TOKENS), "--seed", str(seed))
    tlt("drafter", "train", *sources, *amount, "--out", str(folder))
    return folder


def _settings(half: Path) -> tuple[str, ...]:
    return (*_ONE_DECODES, f"drafter.path={half}")


def _curve(seed: int, half: Path, steps: int) -> Curve:
    first = MergedDrafter(0, load_drafter(half, load_decoder(MODEL, torch.float32).config.layers))
    return Curve([first, *_adopted_drafters(seed, f"algorithm.steps={steps}", *_settings(half))])


def _adopted_drafters(seed: int, *settings: str) -> list[MergedDrafter]:
    """Return the adopted drafters in order."""
    job = run("forced", seed, *settings)
    spec, training = read_ledger(job.folder).spec, job.snapshot.drafter_training
    assert training is not None
    adopted = {each.version for each in training.evaluations if each.adopted}
    made: list[MergedDrafter] = []
    for event in (entry.event for entry in journal_entries(job.folder)):
        if isinstance(event, DrafterMerged) and event.base.version in adopted:
            micro_batches = event.base.micro_batches
            # drafters that were reverted later are left out
            made = [earlier for earlier in made if earlier.micro_batches < micro_batches]
            made.append(MergedDrafter(micro_batches, read_drafter(job.folder, spec, event.drafter)))
    return made


class _FaultInjection:
    """Kill a training worker of a job, and in a later step the decoding one."""

    def __init__(self, settings: Sequence[str]) -> None:
        steps = f"algorithm.steps={_STEPS_FAULTED}"
        self._job, self._folder = submit("forced", _SEEDS[0], *settings, steps)
        self._killed: list[str] = []
        self._await((self._folder / FILE_NAME).exists)
        self._kill(min(self._await(self._members)))
        self._await_next_step()
        self._await(self._members)
        self._kill(min(self._await(lambda: self._workers_with(Duty.ROLLOUT))))
        self._await_next_step()
        self._await_next_step()
        tlt("cancel", self._job)

    def result(self) -> dict[str, Any]:
        events = [entry.event for entry in journal_entries(self._folder)]
        deltas = [e for e in events if isinstance(e, DrafterDeltaReady)]
        stopped = [e for e in events if isinstance(e, DrafterTrainingStopped)]
        longest = {
            incarnation: max(
                e.longest_seconds for e in deltas if e.delta.incarnation == incarnation
            )
            for incarnation in {e.delta.incarnation for e in deltas}
        }
        dropped = [
            (e.dropped_seconds, longest[e.incarnation]) for e in stopped if e.incarnation in longest
        ]
        return {
            "killed": self._killed,
            "lost": max(seconds / most for seconds, most in dropped),
            "workers_lost": sum(isinstance(e, WorkerLost) for e in events),
            "stopped": len(stopped),
            "members": len(longest),
            "micro_batches": sum(e.updates for e in deltas),
        }

    def _state(self) -> RunState:
        return read_ledger(self._folder).state

    def _workers_with(self, duty: Duty) -> list[WorkerId]:
        return [name for name, known in self._state().workers.items() if known.duty is duty]

    def _members(self) -> list[WorkerId]:
        training = self._workers_with(Duty.DRAFTER_TRAINING)
        return training if len(training) == _MEMBERS else []

    def _await_next_step(self) -> None:
        step = self._state().step
        self._await(lambda: self._state().step > step)

    def _await(self, condition: Callable[[], _Found]) -> _Found:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._job}: no such state within {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        return found

    def _kill(self, worker: WorkerId) -> None:
        beats = with_client("default", lambda client: client.workers())
        os.kill(beats[worker].rank_pids[0], signal.SIGKILL)
        self._killed.append(worker)


if __name__ == "__main__":
    main()
