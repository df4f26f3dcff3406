"""Count what a job has lost or doubled: by its journal, and by what its updates were given."""

import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tlt.protocol.commands import Command, IssuePrompts, RecordRolloutBatch, UpdatePolicy
from tlt.protocol.events import PolicyPublished, RolloutDropped, RolloutFinished, RolloutScored
from tlt.report.transition import Transition
from tlt.runs.run_folder_reader import journal_entries, open_ledger
from tlt.spec.config import JobSpec

# step, purpose, prompt, member
Key = tuple[int, str, int, int]
# prompt, member
Sample = tuple[int, int]
# the step that issued it, prompt
Group = tuple[int, int]


class Findings(NamedTuple):
    """Counts of a job's answers, and of those that are wrong; `notes` names the first ones."""

    answers: int
    samples: int
    lost: int
    doubled: int
    # answers that a fault had damaged on the disk, and that were left out by name
    left_out: int
    notes: tuple[str, ...]


class _Answers:
    def __init__(self) -> None:
        self.issued: Counter[Key] = Counter()
        # those of groups that were put off
        self.given_up: set[Key] = set()
        # groups that are in no step's batch yet, and by step those that are
        self.open: dict[Group, set[Key]] = {}
        self.closed: dict[int, list[set[Key]]] = {}
        self.put_off: set[int] = set()
        self.finished: Counter[Key] = Counter()
        self.attempts: dict[Key, int] = {}
        self.dropped: Counter[Key] = Counter()
        # by the attempt that was scored
        self.scores: dict[Key, dict[int, float | None]] = {}
        # by the version that it began with, and the collective; a group's name may come again, but
        # not at the same rendezvous
        self.updates: dict[tuple[int, str], Counter[Sample]] = {}
        self.steps: dict[tuple[int, str], int] = {}
        # samples that the learner says it has learned from, by version
        self.learned: dict[int, int] = {}

    def add(self, change: Transition) -> None:
        before, after = change.before, change.after
        names = ("batch", "ahead", "carried")
        counts = any(getattr(after, name) is not getattr(before, name) for name in names)
        match change.event:
            case RolloutFinished() if counts:
                key = _key(change.event)
                self.finished[key] += 1
                self.attempts[key] = change.event.attempt
            case RolloutDropped() if counts:
                self.dropped[_key(change.event)] += 1
            case RolloutScored():
                scores = self.scores.setdefault(_key(change.event), {})
                scores.setdefault(change.event.attempt, change.event.reward)
            case PolicyPublished() if change.counts and change.event.metrics is not None:
                version = change.event.policy.version
                self.learned[version] = change.event.metrics.samples
            case _:
                pass
        for command in change.commands:
            self._add_command(command)
            if isinstance(command, RecordRolloutBatch) and command.purpose == "train":
                self._close(command, change.after.spec)

    def _add_command(self, command: Command) -> None:
        match command:
            case IssuePrompts():
                for prompt, count in zip(command.prompts, command.counts, strict=True):
                    for member in range(count):
                        key = (int(command.step), command.purpose, int(prompt), member)
                        self.issued[key] += 1
                        if command.purpose == "train":
                            self.open.setdefault((key[0], key[2]), set()).add(key)
                if command.purpose == "train":
                    self.put_off.difference_update(command.prompts)
            case UpdatePolicy():
                update = (int(command.version), f"{command.rendezvous}/{command.group}")
                self.steps[update] = int(command.step)
                samples = self.updates.setdefault(update, Counter())
                samples.update(
                    (int(sample.prompt), int(sample.member))
                    for share in command.minibatches
                    for rank in share.ranks
                    for sample in rank
                )
            case _:
                pass

    def _close(self, command: RecordRolloutBatch, spec: JobSpec) -> None:
        """Take complete groups from the open ones; give up the others, or leave them open."""
        defers, apart = spec.rollout.defer_long > 0, spec.algorithm.staleness > 0
        complete = [
            group
            for group, keys in self.open.items()
            if (not apart or group[0] == command.step) and all(map(self._settled, keys))
        ]
        self.closed[int(command.step)] = [self.open.pop(group) for group in complete]
        if defers:
            for (_, prompt), keys in self.open.items():
                self.given_up |= keys
                self.put_off.add(prompt)
            self.open = {}

    def _settled(self, key: Key) -> bool:
        return key in self.dropped or self.scored(key)

    def score(self, key: Key) -> float | None:
        """Return the reward of the attempt that counts."""
        return self.scores.get(key, {}).get(self.attempts.get(key, -1))

    def scored(self, key: Key) -> bool:
        return self.attempts.get(key, -1) in self.scores.get(key, {})

    def trainable(self, step: int) -> set[Sample]:
        """Return the samples that an update of a step has to hold: of groups that disagree."""
        found = set[Sample]()
        for keys in self.closed.get(step, []):
            scores = {key: score for key in keys if (score := self.score(key)) is not None}
            if len(set(scores.values())) > 1:
                found |= {key[2:] for key in scores}
        return found


def check_job(run: Path, damaged: set[Key]) -> Findings:
    """Check a job that has ended; only damaged answers may lack a reward."""
    answers, ledger = _Answers(), open_ledger(run)
    for entry in journal_entries(run):
        answers.add(ledger.add(entry.event, entry.at))
    lost, doubled = _check_answers(answers, damaged)
    more_lost, more_doubled = _check_updates(answers)
    lost, doubled = lost + more_lost, doubled + more_doubled
    last = ledger.snapshot()
    if last.status != "done" or len(last.steps) != last.steps_planned:
        lost.append(f"it is {last.status} after {len(last.steps)} steps: {last.error}")
    lost += [f"no step has the group {group}" for group in answers.open]
    lost += [f"the prompt {prompt} was put off for ever" for prompt in answers.put_off]
    algorithm = ledger.spec.algorithm
    for step in last.steps:
        groups = answers.closed.get(step.step, [])
        hit = sum(len(keys & damaged) for keys in groups)
        # more may be complete by the time that a paused job goes on
        if len(groups) < algorithm.prompts_per_step:
            lost.append(f"step {step.step} has {len(groups)} groups")
        missing = sum(map(len, groups)) - step.rollouts
        if not 0 <= missing <= hit:
            lost.append(f"step {step.step} has {step.rollouts} answers, {hit} were damaged")
    return Findings(
        answers=len(answers.issued),
        samples=sum(answers.learned.values()),
        lost=len(lost),
        doubled=len(doubled),
        left_out=sum(answers.scored(k) and answers.score(k) is None for k in answers.issued),
        notes=tuple((lost + doubled)[:10]),
    )


def _check_answers(answers: _Answers, damaged: set[Key]) -> tuple[list[str], list[str]]:
    """Each answer that was issued is finished and scored, once."""
    lost: list[str] = []
    doubled = [f"{key} was issued {n} times" for key, n in answers.issued.items() if n > 1]
    doubled += [f"{key} counts {n} times" for key, n in answers.finished.items() if n > 1]
    for key in set(answers.issued) - answers.given_up:
        if key in answers.dropped and key not in damaged:
            lost.append(f"{key} was dropped")
        elif key in answers.dropped and key in answers.finished:
            doubled.append(f"{key} was dropped and counts")
        elif key not in answers.dropped and not answers.scored(key):
            lost.append(f"{key} has finished {answers.finished[key]} times and no score")
        elif key not in damaged and answers.scored(key) and answers.score(key) is None:
            lost.append(f"{key} was left out")
        elif (score := answers.score(key)) is not None and not math.isfinite(score):
            lost.append(f"{key} has the reward {score}")
    unknown = set(answers.finished) - set(answers.issued)
    return lost, doubled + [f"{key} counts and was not issued" for key in unknown]


def _check_updates(answers: _Answers) -> tuple[list[str], list[str]]:
    """Each attempt at an update holds each sample of its step once, and learned from all."""
    lost: list[str] = []
    doubled: list[str] = []
    for (version, collective), samples in answers.updates.items():
        expected = answers.trainable(answers.steps[version, collective])
        lost += [f"{s} is not in update {version}" for s in expected - set(samples)]
        doubled += [f"{s} is in update {version} unasked" for s in set(samples) - expected]
        doubled += [f"{s} is {n} times in update {version}" for s, n in samples.items() if n > 1]
        learned = answers.learned.get(version + 1, len(expected))
        if learned != len(expected):
            lost.append(f"update {version} learned from {learned} of {len(expected)} samples")
    return lost, doubled


def _key(event: RolloutFinished | RolloutDropped | RolloutScored) -> Key:
    return int(event.step), event.purpose, int(event.prompt), int(event.member)
