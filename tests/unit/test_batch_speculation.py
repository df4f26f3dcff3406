"""Results of SGLang's steps are paired with the choices that made them, however late they come."""

import gc
import weakref
from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
import torch

from tlt.base.id_types import DrafterVersion
from tlt.base.strategies import Draft, Ngram, Off, Strategy, max_drafts
from tlt.engine.sglang.scheduler import speculation_controller
from tlt.engine.sglang.scheduler.speculation_controller import (
    BatchSpeculation,
    LaunchedStep,
    Mark,
    RunningText,
    StepClock,
)
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions
from tlt.policies.speculation.configured_policy import ScriptedPolicy
from tlt.policies.speculation.strategy_policy import RunObservation

ARMS: tuple[Strategy, ...] = (Off(), Draft(depth=2, noise=False), Ngram(tokens=4))


@dataclass
class Served:
    """A request of a scheduler that hands out results `late` steps after they were launched."""

    rid: str
    length: int
    origin_input_ids: list[int] = field(default_factory=lambda: [1, 2, 3])
    output_ids: list[int] = field(default_factory=lambda: [4])
    finished_len: int | None = None

    def finished(self) -> bool:
        return self.finished_len is not None

    def gain(self, tokens: list[int]) -> None:
        if self.finished():
            return
        self.output_ids += tokens
        if len(self.output_ids) >= self.length:
            self.finished_len = self.length


def new_speculation(fixed: Strategy | None = None, control: float = 0.0) -> BatchSpeculation:
    options = SpeculationOptions(
        algorithm="EAGLE",
        drafter="",
        trained=False,
        layers=1,
        arms=ARMS,
        fixed=fixed,
        control_share=control,
        seed=1,
    )
    return BatchSpeculation(options, StepClock(torch.device("cpu")))


def decode(speculation: BatchSpeculation, requests: list[Served], late: int) -> None:
    """Decode to the end; a request accepts as many drafts as its name and the step say."""
    launched: deque[tuple[LaunchedStep, list[int]]] = deque()

    def process() -> None:
        step, accepted = launched.popleft()
        speculation.complete(accepted)
        for request, right in zip(step.requests, accepted, strict=True):
            assert isinstance(request, Served)
            request.gain([5] * (right + 1))

    number = 0
    while running := [request for request in requests if not request.finished()]:
        step = speculation.begin_step(running, sum(len(r.output_ids) for r in running))
        step.width = min(2, max_drafts(step.choice.strategy))
        accepted = [min(step.width, (number + int(r.rid)) % 3) for r in running]
        step.tokens = lambda accepted=accepted: [[5] * (right + 1) for right in accepted]
        speculation.launch(step)
        launched.append((step, accepted))
        number += 1
        if len(launched) > late:
            process()
    while launched:
        process()


@pytest.mark.parametrize("late", [0, 1])
def test_counts_each_token_once_however_late_results_are(late: int) -> None:
    speculation = new_speculation(Draft(depth=2, noise=False))
    speculation.use_drafter(DrafterVersion(7))
    requests = [Served(str(i), 10 + 3 * i) for i in range(5)]
    decode(speculation, requests, late)
    tallies = speculation.take_tallies(idle=True)
    # each began with one token
    assert sum(tally.tokens for tally in tallies) == sum(r.length - 1 for r in requests)
    assert {tally.drafter for tally in tallies} == {7}
    assert {tally.strategy for tally in tallies} == {Draft(depth=2, noise=False)}


def test_late_results_give_the_tallies_of_prompt_ones() -> None:
    """Requests of one length, so that the same batches are launched."""
    found = []
    for late in (0, 1):
        speculation = new_speculation(Draft(depth=2, noise=False), control=0.2)
        speculation.use_drafter(DrafterVersion(1))
        requests = [Served(str(3 * i), 400) for i in range(4)]
        decode(speculation, requests, late)
        tallies = speculation.take_tallies(idle=True)
        found.append({(t.strategy, t.control is None): t.tokens for t in tallies})
    assert found[0].keys() == found[1].keys()
    assert sum(found[0].values()) == sum(found[1].values()) == 4 * 399


class Scripted(ScriptedPolicy):
    """Note what is observed."""

    script = (*ARMS, ARMS[1], ARMS[0], ARMS[2], ARMS[1])

    def __init__(self, steps: int) -> None:
        super().__init__([(strategy, steps) for strategy in self.script])
        self.observed: list[RunObservation] = []

    def observe(self, run: RunObservation) -> None:
        self.observed.append(run)


def scripted(monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[BatchSpeculation, Scripted]:
    policy = Scripted(steps)
    monkeypatch.setattr(speculation_controller, "configured_policy", lambda *_: policy)
    speculation = new_speculation()
    speculation.use_drafter(DrafterVersion(1))
    return speculation, policy


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_pairs_each_choice_with_its_own_results(
    monkeypatch: pytest.MonkeyPatch, steps: int, late: int
) -> None:
    """Requests of one length accept alike, and end in the same step."""
    found: list[list[tuple[Strategy, int, int, int]]] = []
    for delay in (0, late):
        speculation, policy = scripted(monkeypatch, steps)
        decode(speculation, [Served(str(i), 90) for i in (0, 3, 6)], delay)
        runs = [(r.strategy, r.steps, sum(r.accepted), r.full_passes) for r in policy.observed]
        # steps that were launched after the end belong to the last runs
        found.append(runs[: len(runs) - 2])
    prompt, delayed = found
    assert len(prompt) > 5
    assert [run[0] for run in prompt] == [
        Scripted.script[number % len(Scripted.script)] for number in range(len(prompt))
    ]
    assert {run[1] for run in prompt} == {steps}
    assert delayed[: len(prompt)] == prompt


def test_a_swap_ends_the_learning_from_steps_that_are_still_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation, policy = scripted(monkeypatch, steps=3)
    request = Served("0", 900)
    steps = [speculation.begin_step([request], 4) for _ in range(2)]
    for step in steps:
        speculation.launch(step)
    speculation.complete([0])
    request.gain([5])
    speculation.use_drafter(DrafterVersion(2))
    # the step whose result was known is observed, before the swap
    assert [run.steps for run in policy.observed] == []
    speculation.complete([0])
    request.gain([5])
    speculation.count_completed()
    assert policy.observed == []
    for _ in range(4):
        step = speculation.begin_step([request], 4)
        speculation.launch(step)
        speculation.complete([0])
        request.gain([5])
    assert [run.steps for run in policy.observed] == [3]


def test_keeping_the_drafters_cache_is_no_part_of_a_plain_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation, policy = scripted(monkeypatch, steps=2)
    clock = speculation.clock
    request = Served("0", 900)
    seconds = iter(float(second) for second in range(1000))

    def mark() -> Mark:
        now = next(seconds)
        return Mark(wall=now, work=now)

    monkeypatch.setattr(clock, "mark", mark)
    for _ in range(3):
        step = speculation.begin_step([request], 4)
        step.extended.append((clock.mark(), clock.mark()))
        speculation.launch(step)
        speculation.complete([0])
        request.gain([5])
    (plain,) = policy.observed
    tallies = speculation.take_tallies(idle=True)
    overhead = sum(t.overhead for t in tallies if t.strategy == Off())
    work = sum(t.work for t in tallies if t.strategy == Off())
    assert overhead == 2.0
    assert plain.seconds == pytest.approx(work - overhead)


def test_refuses_results_of_another_batch() -> None:
    speculation = new_speculation(Off())
    step = speculation.begin_step([Served("0", 9), Served("1", 9)], 2)
    speculation.launch(step)
    with pytest.raises(RuntimeError, match="not in the order of its steps"):
        speculation.complete([0])


def test_proposes_with_a_drafter_only_while_there_is_one() -> None:
    speculation = new_speculation()
    requests = [Served("0", 600)]

    def strategies() -> set[type[Strategy]]:
        found: set[type[Strategy]] = set()
        for _ in range(200):
            step = speculation.begin_step(requests, 10)
            found.add(type(step.choice.strategy))
            speculation.launch(step)
            speculation.complete([0])
            requests[0].gain([5])
        return found

    assert Draft not in strategies()
    speculation.use_drafter(DrafterVersion(1))
    requests[0] = Served("1", 600)
    assert Draft in strategies()
    speculation.use_drafter(None)
    requests[0] = Served("2", 600)
    assert Draft not in strategies()
    speculation.use_drafter(DrafterVersion(2))
    assert not speculation.allow(False)
    assert speculation.drafter is None
    requests[0] = Served("3", 600)
    assert strategies() == {Off}
    # the drafter's cache is behind now
    assert speculation.allow(True)
    assert not speculation.allow(True)
    assert speculation.drafter == 2
    requests[0] = Served("4", 600)
    assert Draft in strategies()


def test_reads_tokens_that_the_host_does_not_know_yet() -> None:
    speculation = new_speculation(Off())
    request = Served("0", 50)
    step = speculation.begin_step([request], 4)
    step.tokens = lambda: [[8, 9]]
    speculation.launch(step)
    assert speculation.answer_so_far(request, 3) == [4, 8, 9]
    speculation.complete([1])
    request.gain([8, 9])
    assert speculation.answer_so_far(request, 3) == [4, 8, 9]


def test_indexes_ended_answers_for_their_siblings() -> None:
    speculation = new_speculation(Ngram(tokens=4))
    ended, sibling = Served("0", 9), Served("1", 30)
    ended.output_ids = [4, 6, 7, 8, 9, 10, 11, 12, 13]
    ended.finished_len = 9
    speculation.count_completed()
    speculation.begin_step([ended, sibling], 10)
    speculation.begin_step([sibling], 10)
    text = RunningText("1", sibling.origin_input_ids, [4, 6])
    assert speculation.propose_ngrams([text], 4) == [[7, 8, 9, 10]]


def test_sums_are_the_same_for_any_mixture_of_lengths() -> None:
    random = Random(3)
    for late in (0, 1):
        speculation = new_speculation(control=0.1)
        speculation.use_drafter(DrafterVersion(2))
        requests = [Served(str(i), random.randint(2, 90)) for i in range(12)]
        decode(speculation, requests, late)
        tallies = speculation.take_tallies(idle=True)
        assert sum(tally.tokens for tally in tallies) == sum(r.length - 1 for r in requests)


def test_counts_a_step_before_the_next_result_arrives() -> None:
    """Two results may arrive in a row, without a step between them."""
    speculation, request = new_speculation(Off()), Served("0", 50)
    for _ in range(2):
        speculation.launch(speculation.begin_step([request], 4))
    for _ in range(2):
        speculation.complete([0])
        request.gain([5])
    assert sum(tally.tokens for tally in speculation.take_tallies(idle=True)) == 2


def test_drafts_behind_a_stop_token_were_neither_reached_nor_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculation, policy = scripted(monkeypatch, steps=1)
    request = Served("0", 50)
    for accepted, tokens in ((0, [5]), (2, [6, 7, 8])):
        step = speculation.begin_step([request], 4)
        step.width = max_drafts(step.choice.strategy)
        speculation.launch(step)
        speculation.complete([accepted])
        request.gain(tokens)
    request.finished_len = len(request.output_ids) - 2  # 6 was a stop token
    speculation.take_tallies(idle=True)
    speculation.begin_step([Served("1", 50)], 4)
    assert (policy.observed[1].reached, policy.observed[1].accepted) == ([1, 0], [1, 0])


def test_forgets_requests_that_were_aborted_while_they_waited() -> None:
    """A request that leaves a batch unfinished was retracted, unless nothing runs any more."""
    speculation = new_speculation(Ngram(tokens=4))
    retracted, other = Served("0", 50), Served("1", 50)
    for requests in ([retracted, other], [other]):
        speculation.launch(speculation.begin_step(requests, 4))
        speculation.complete([0] * len(requests))
        other.gain([5])
    known = weakref.ref(retracted)
    del retracted, requests
    gc.collect()
    assert known() is not None
    other.finished_len = 3
    speculation.take_tallies(idle=True)
    gc.collect()
    assert known() is None
