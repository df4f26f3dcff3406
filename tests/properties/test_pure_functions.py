"""Small pure functions that `decide` uses keep their invariants."""

import math
import statistics
from collections import Counter

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.samples import ANSWER_REF
from tests.simulation.incarnation import WorkerIncarnation
from tests.simulation.worker_events import JOB, answer
from tlt.base.id_types import Attempt, Epoch, Incarnation, Member, PromptIndex, Step, WorkerId
from tlt.policies.algorithm.advantages import Scored, compute_advantages
from tlt.policies.algorithm.sample_sharding import Sample, share_samples
from tlt.policies.keyed_random import permuted
from tlt.policies.run import rollout_batch
from tlt.policies.run.rollout_batch import RolloutBatch
from tlt.protocol.commands import PromptIssued
from tlt.protocol.events import RolloutDropped, RolloutFinished, RolloutScored

keys = st.lists(st.integers(-(2**40), 2**40), max_size=3)
lengths = st.lists(st.integers(1, 5000), max_size=60)


# --- keyed --------------------------------------------------------------------------------------


@given(size=st.integers(1, 300), key=keys)
def test_permuted_is_a_bijection(size: int, key: list[int]) -> None:
    assert sorted(permuted(i, size, *key) for i in range(size)) == list(range(size))


def test_permuted_depends_on_its_key() -> None:
    orders = {tuple(permuted(i, 64, key) for i in range(64)) for key in range(20)}
    assert len(orders) == 20


# --- sharding -----------------------------------------------------------------------------------


def _samples(lengths: list[int], prompts: list[int] | None = None) -> list[Sample]:
    """Make samples of groups of four; the lengths of their prompts take turns."""
    return [
        Sample(
            PromptIndex(i // 4),
            Member(i % 4),
            float(i % 2),
            float(i),
            length,
            ANSWER_REF,
            prompts[i % len(prompts)] if prompts else 0,
        )
        for i, length in enumerate(lengths)
    ]


@given(
    lengths=lengths,
    workers=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    minibatches=st.integers(1, 5),
    key=keys,
    spoken=st.integers(1, 3),
)
def test_every_sample_is_on_one_rank_of_one_minibatch(
    lengths: list[int], workers: list[int], minibatches: int, key: list[int], spoken: int
) -> None:
    """Silent samples are on none, but count in the totals of the minibatches that are left."""
    both = _samples(lengths)
    samples = [sample for i, sample in enumerate(both) if i % spoken == 0]
    silent = [sample for i, sample in enumerate(both) if i % spoken != 0]
    parts = share_samples(samples, silent, workers, minibatches, *key)
    refs = [r for part in parts for share in part for rank in share.ranks for r in rank]
    got = Counter((r.prompt, r.member, r.advantage) for r in refs)
    assert got == Counter((s.prompt, s.member, s.advantage) for s in samples)
    count = max(1, min(minibatches, len(both)))
    left = len(parts[0])
    assert left == count if not silent else left <= count
    for part, size in zip(parts, workers, strict=True):
        assert len(part) == left
        assert all(len(share.ranks) == size for share in part)
    by_name = {(s.prompt, s.member): s.length for s in samples}
    tokens = sequences = 0
    for index in range(left):
        ((total, answers),) = {(p[index].total_tokens, p[index].total_sequences) for p in parts}
        batch = [r for part in parts for rank in part[index].ranks for r in rank]
        assert batch or not samples
        heard = sum(by_name[r.prompt, r.member] for r in batch)
        if silent:
            assert (total, answers) >= (heard, len(batch))
            assert answers >= len(both) // count
        else:
            assert (total, answers) == (heard, len(batch))
        tokens, sequences = tokens + total, sequences + answers
    if left == count:
        assert (tokens, sequences) == (sum(lengths), len(lengths))


@given(
    lengths=lengths,
    prompts=st.lists(st.integers(1, 5000), max_size=4),
    ranks=st.integers(1, 8),
    minibatches=st.integers(1, 4),
)
@example(lengths=[100, 100, 90, 90], prompts=[3000, 10], ranks=2, minibatches=1)
def test_ranks_and_minibatches_are_balanced(
    lengths: list[int], prompts: list[int], ranks: int, minibatches: int
) -> None:
    """Assert that loads of ranks and sizes of minibatches differ by at most one sample.

    A load counts all tokens that are computed, long prompts before short answers included.
    """
    samples = _samples(lengths, prompts)
    (part,) = share_samples(samples, (), [ranks], minibatches, 1)
    by_name = {(s.prompt, s.member): s.prompt_length + s.length for s in samples}
    sizes = [share.total_sequences for share in part]
    assert max(sizes) - min(sizes) <= 1
    for share in part:
        loads = [sum(by_name[r.prompt, r.member] for r in rank) for rank in share.ranks]
        longest = max(
            (by_name[r.prompt, r.member] for rank in share.ranks for r in rank), default=0
        )
        assert max(loads) - min(loads) <= longest


@given(lengths=lengths, data=st.data())
def test_shares_do_not_depend_on_the_order_of_samples(
    lengths: list[int], data: st.DataObject
) -> None:
    samples = _samples(lengths)
    shuffled = data.draw(st.permutations(samples))
    assert share_samples(samples, (), [2, 1], 2, 7) == share_samples(shuffled, (), [2, 1], 2, 7)


# --- advantages ---------------------------------------------------------------------------------


_rewards = st.lists(st.floats(-100, 100).map(lambda r: round(r, 3)), max_size=16)
_groups = st.lists(
    st.lists(st.builds(Scored, st.floats(-100, 100).map(lambda r: round(r, 3)), st.integers(1, 9))),
    max_size=5,
)


def _equally_long(rewards: list[float]) -> list[Scored]:
    return [Scored(reward, 5) for reward in rewards]


@given(rewards=_rewards, normalise=st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float], normalise: bool) -> None:
    (advantages,) = compute_advantages([_equally_long(rewards)], "group", normalise)
    assert (advantages is None) == (len(set(rewards)) < 2)
    if advantages is None:
        return
    assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
    ranked = [a for _, a in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(ranked)
    if normalise:
        square = math.fsum(a * a for a in advantages) / (len(advantages) - 1)
        assert square == pytest.approx(1, rel=0.02)


@given(rewards=_rewards)
def test_leave_one_out_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    (advantages,) = compute_advantages([_equally_long(rewards)], "leave_one_out", False)
    if advantages is None:
        assert len(set(rewards)) < 2
        return
    for index, (reward, advantage) in enumerate(zip(rewards, advantages, strict=True)):
        others = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(reward - sum(others) / len(others), abs=1e-6)


@given(groups=_groups, normalise=st.booleans())
def test_batch_advantages_compare_the_tokens_of_all_answers(
    groups: list[list[Scored]], normalise: bool
) -> None:
    for name in ("batch", "group_batch"):
        tokens: list[float] = []
        for group in groups:
            base = math.fsum(a.reward for a in group) / max(1, len(group))
            for reward, length in group:
                tokens += [reward - (base if name == "group_batch" else 0.0)] * length
        mean = math.fsum(tokens) / max(1, len(tokens))
        deviation = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
        scale = 1.0 / (deviation + 1e-6) if normalise else 1.0
        found = compute_advantages(groups, name, normalise)
        flat = [
            a
            for group, of_group in zip(groups, found, strict=True)
            for (_, length), a in zip(group, of_group or [0.0] * len(group), strict=True)
            for _ in range(length)
        ]
        expected = [scale * (token - mean) for token in tokens]
        assert flat == pytest.approx(expected, abs=1e-2 if normalise else 1e-6)


# --- batches ------------------------------------------------------------------------------------

AnswerEvent = RolloutFinished | RolloutScored | RolloutDropped
_MEMBERS = [(PromptIndex(p), Member(m)) for p in range(2) for m in range(2)]


def _finished(prompt: PromptIndex, member: Member, attempt: int) -> RolloutFinished:
    issued = PromptIssued(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(attempt),
        purpose="train",
        prompt=prompt,
        member=member,
        tokens=(1,),
    )
    return answer(WorkerIncarnation(WorkerId("w"), Incarnation(1), 1), issued)


def _scored(done: RolloutFinished, reward: float) -> RolloutScored:
    return RolloutScored(
        job=JOB,
        epoch=done.epoch,
        step=done.step,
        attempt=done.attempt,
        purpose=done.purpose,
        prompt=done.prompt,
        member=done.member,
        length=done.length,
        reward=reward,
    )


def _dropped(prompt: PromptIndex, member: Member) -> RolloutDropped:
    return RolloutDropped(
        job=JOB,
        epoch=Epoch(1),
        step=Step(0),
        attempt=Attempt(2),
        purpose="train",
        prompt=prompt,
        member=member,
        reason="test",
    )


@st.composite
def histories(draw: st.DrawFn) -> list[AnswerEvent]:
    """Draw for each member an answer with scores of several attempts, or its loss."""
    events: list[AnswerEvent] = []
    for prompt, member in _MEMBERS:
        if draw(st.booleans()):
            events.append(_dropped(prompt, member))
            continue
        counts = draw(st.integers(0, 2))
        events.append(_finished(prompt, member, counts))
        for attempt in {counts, draw(st.integers(0, 2))}:
            events.append(_scored(_finished(prompt, member, attempt), float(attempt)))
    return events


def _fold(events: list[AnswerEvent]) -> RolloutBatch:
    state = rollout_batch.new_batch(Step(0), "train", (PromptIndex(0), PromptIndex(1)), (2, 2))
    for event in events:
        assert rollout_batch.contains(state, event)
        before, state = state, rollout_batch.settle(state, event)
        assert rollout_batch.settle(state, event) is state
        assert state.unsettled == sum(
            not a.settled for group in state.groups.values() for a in group.members
        )
        assert state is not before or events.count(event) > 1 or isinstance(event, RolloutScored)
    return state


@given(events=histories(), data=st.data())
def test_a_rollout_batch_ends_the_same_in_every_order(
    events: list[AnswerEvent], data: st.DataObject
) -> None:
    """Repeated events change nothing."""
    repeated = data.draw(st.lists(st.sampled_from(events), max_size=6))
    shuffled = data.draw(st.permutations(events + repeated))
    plain, other = _fold(events), _fold(shuffled)
    assert plain.settled
    assert other.settled
    assert plain.rewards() == other.rewards()


@given(events=histories(), data=st.data())
def test_a_rollout_batch_closes_only_when_complete(
    events: list[AnswerEvent], data: st.DataObject
) -> None:
    missing = data.draw(st.sampled_from(events))
    needed = not isinstance(missing, RolloutScored) or any(
        isinstance(e, RolloutFinished)
        and (e.prompt, e.member, e.attempt) == (missing.prompt, missing.member, missing.attempt)
        for e in events
    )
    assume(needed)
    assert not _fold([event for event in events if event is not missing]).settled


def test_does_not_drop_a_scored_answer() -> None:
    done = _finished(PromptIndex(0), Member(0), 0)
    late = _dropped(PromptIndex(0), Member(0))
    assert _fold([done]) == _settled(_settled(_fold([]), done), late)


def test_does_not_score_a_dropped_answer() -> None:
    late = _finished(PromptIndex(0), Member(0), 2)
    lost = _dropped(PromptIndex(0), Member(0))
    state = _settled(_fold([lost]), late)
    assert state == _fold([lost])
    assert _settled(state, _scored(late, 1.0)).rewards() == []


def _settled(state: RolloutBatch, event: AnswerEvent) -> RolloutBatch:
    return rollout_batch.settle(state, event)
