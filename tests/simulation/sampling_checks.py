"""Invariants of the prompts that batches issue, dynamic sampling included."""

from collections import defaultdict
from typing import TYPE_CHECKING

from tlt.policies.algorithm.sample_sharding import UpdatePlan
from tlt.policies.run.run_state import RunState
from tlt.protocol.commands import IssuePrompts

if TYPE_CHECKING:
    from tests.simulation.checks import Checks


class SamplingChecks:
    def __init__(self, checks: "Checks") -> None:
        self._checks = checks
        # by step: the groups that were replaced, in the order in which they were
        self.replaced: defaultdict[int, list[int]] = defaultdict(list)
        # by step: the groups that it began with
        self.issued: dict[int, int] = {}
        # prompts whose groups a step ended without
        self.put_off: set[int] = set()
        self._used: set[tuple[int, int]] = set()

    def issue(self, command: IssuePrompts, after: RunState) -> None:
        """Assert that a prompt is issued once in an epoch, and for a group that agrees."""
        key = (int(command.step), str(command.purpose))
        assert len(set(command.prompts)) == len(command.prompts)
        answers: set[tuple[int, str, int, int]] = {
            (*key, prompt, member)
            for prompt, count in zip(command.prompts, command.counts, strict=True)
            for member in range(count)
        }
        if command.replaces is None:
            assert key not in self._checks.batches
            self._checks.batches[key] = answers
        else:
            assert after.spec.algorithm.dynamic_sampling
            assert key not in self._checks.closed
            assert self._agrees(command.step, command.replaces)
            assert command.replaces not in self.replaced[key[0]]
            assert len(command.prompts) == 1
            assert not answers & self._checks.batches[key]
            self.replaced[key[0]].append(command.replaces)
            self._checks.batches[key] |= answers
        if command.purpose == "train":
            # no prompt has two groups at once, but in two epochs
            apart = self._checks.keeps_steps_apart
            prompts = {a[2] for a in self._checks.open if not apart or a[0] == command.step}
            assert not prompts & set(command.prompts)
            self._checks.open |= answers
            assert after.cursor is not None
            self.issued.setdefault(key[0], len(command.prompts))
            new = set(command.prompts) - self.put_off
            self.put_off -= set(command.prompts)
            if after.cursor.sources or apart:
                # sources go through epochs of their own, and two steps may take prompts in one
                # decision, in which an epoch ends
                return
            used = {(after.cursor.epoch, prompt) for prompt in new}
            assert not used & self._used
            assert not any(after.cursor.skipped.get(p, -1) >= e for e, p in used)
            self._used |= used

    def _agrees(self, step: int, prompt: int) -> bool:
        """Return True if all answers of a group are known, and have one reward at most."""
        apart = self._checks.keeps_steps_apart
        answers = [a for a in self._checks.open if a[2] == prompt and (not apart or a[0] == step)]
        for answer in answers:
            assert self._checks.is_scored(answer) or answer in self._checks.dropped
        scores = [self._checks.score(answer) for answer in answers]
        return len({score for score in scores if score is not None}) <= 1

    def check_plan(self, plan: UpdatePlan, state: RunState) -> None:
        """Assert that groups that agree are replaced as long as the batch may grow."""
        algorithm = state.spec.algorithm
        prompts = {answer[2] for answer in self._checks.batches[plan.step, "train"]}
        differing = {sample.prompt for sample in plan.samples}
        ends_early = state.spec.rollout.surplus(1) > 0
        if ends_early and algorithm.dynamic_sampling:
            return  # groups that agree may be left over from earlier steps
        if ends_early:
            # more may be complete by the time that a lost policy is restored
            assert len(prompts) >= algorithm.prompts_per_step
            return
        if not algorithm.dynamic_sampling:
            assert len(prompts) == algorithm.prompts_per_step
            return
        assert not plan.silent
        most = int(algorithm.max_num_gen_batches * algorithm.prompts_per_step)
        most = min(most, state.train_prompts)
        assert len(prompts) == algorithm.prompts_per_step + len(self.replaced[plan.step])
        assert len(differing) == algorithm.prompts_per_step or len(prompts) == most
        assert len(differing) <= algorithm.prompts_per_step
