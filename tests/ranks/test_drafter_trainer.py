"""A rank's part in training the drafter: nothing is added twice, nothing stops what goes on."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from tests.interrupts import interrupting_checks
from tests.ranks.ranks import local_rank, open_job, with_policy
from tests.samples import JOB, prompt
from tlt.blobs import Blobs
from tlt.config import DrafterSpec, RolloutSpec, SpeculationSpec
from tlt.ids import Digest, DrafterVersion, Incarnation, Step, WorkerId
from tlt.interrupt import Interrupted
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.policies.drafter import gate
from tlt.protocol.commands import MergeDrafter, TrainDrafter
from tlt.protocol.events import (
    DrafterDeltaReady,
    DrafterDiverged,
    DrafterMerged,
    DrafterTrainingStopped,
)
from tlt.protocol.rank_messages import DecodePrompts, FromRank
from tlt.protocol.refs import BlobRef, DrafterBase
from tlt.ranks.drafter_trainer import DrafterTrainer
from tlt.ranks.main import Rank
from tlt.strategies import Draft
from tlt.trainer.drafter.drafter_learner import MicroBatchResult

Kind = TypeVar("Kind")
WORKER = WorkerId("worker-1")
FIRST, SECOND = DrafterVersion(0), DrafterVersion(1)
NEW = DrafterBase(version=FIRST, root=FIRST, weights=None, updates=0, micro_batches=0)


def check() -> None:
    pass


def interrupt() -> None:
    raise Interrupted


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Two of one worker, each with four answers to learn from."""
    spec = with_policy(
        tmp_path,
        rollout=RolloutSpec(max_new_tokens=100, slots=4),
        speculation=SpeculationSpec(mode="adaptive"),
        drafter=DrafterSpec(train="always"),
    )
    with local_rank(tmp_path, 0) as one, local_rank(tmp_path, 1) as other:
        for index, local in enumerate((one, other)):
            local.rank.handle(open_job(tmp_path, spec))
            prompts = tuple(prompt(7 + index, member=m) for m in range(4))
            local.rank.handle(DecodePrompts(job=JOB, prompts=prompts))
            duties = local.rank.duties
            assert duties is not None
            while duties.engine.running:
                duties.rollout.step()
        yield [one.rank, other.rank]


def draft_of(rank: Rank) -> DrafterTrainer:
    assert rank.duties is not None
    assert rank.duties.drafter is not None
    return rank.duties.drafter


def school(base: DrafterBase, training_session: int = 1) -> TrainDrafter:
    return TrainDrafter(
        worker=WORKER,
        incarnation=Incarnation(1),
        job=JOB,
        step=Step(0),
        training_session=training_session,
        base=base,
    )


def merge(base: DrafterBase, version: int, *learned: DrafterDeltaReady) -> MergeDrafter:
    return MergeDrafter(
        worker=WORKER,
        incarnation=Incarnation(1),
        job=JOB,
        step=Step(0),
        training_session=1,
        version=DrafterVersion(version),
        base=base,
        deltas=tuple(one.delta for one in learned),
    )


def handed_in(draft: DrafterTrainer, base: DrafterBase) -> DrafterDeltaReady:
    """After two micro-batches on this trunk."""
    draft.begin(school(base))
    found = [*draft.step(check), *draft.step(check)]
    if not found:
        assert draft._school is not None
        assert draft._member is not None
        found = draft._hand_in(draft._school, draft._member, check)
    return only(found, DrafterDeltaReady)


def merged(draft: DrafterTrainer, asked: MergeDrafter) -> DrafterMerged:
    draft.ask(asked)
    return only(draft.step(check), DrafterMerged)


def only(frames: list[FromRank], kind: type[Kind]) -> Kind:
    (found,) = frames
    assert isinstance(found, kind)
    return found


def test_a_delta_that_is_merged_late_is_in_what_its_member_learned_no_more(
    ranks: list[Rank],
) -> None:
    """It stood on the trunk before the last, and its member has gone on to the last since."""
    merges, late = map(draft_of, ranks)
    own, others = handed_in(merges, NEW), handed_in(late, NEW)
    second = merged(merges, merge(NEW, 1, own)).base
    late._on_trunk(second, check)
    merges.begin(school(second))
    third = merged(merges, merge(second, 2, others)).base
    learner = late._on_trunk(third, check).learner
    assert third.weights is not None
    expected = read_weights(late._blobs, third.weights)
    torch.testing.assert_close(learner.snapshot().tensors, expected)
    assert learner.updates == third.updates


def test_a_merge_that_something_interrupts_is_made_afterwards(ranks: list[Rank]) -> None:
    draft = draft_of(ranks[0])
    draft.ask(merge(NEW, 1, handed_in(draft, NEW)))
    with pytest.raises(Interrupted):
        draft.step(interrupt)
    assert only(draft.step(check), DrafterMerged).base.version == 1
    assert not any(isinstance(frame, DrafterMerged) for frame in draft.step(check))


def test_a_micro_batch_that_was_too_long_to_be_finished_shortens_the_next(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, now = draft_of(ranks[0]), [0.0]
    monkeypatch.setattr(draft, "_work_clock", lambda: now[0])
    draft.begin(school(NEW))

    def told_to_stop_after(seconds: float) -> None:
        now[0] += seconds
        if draft._member is not None and draft._member.ref is not None:
            raise Interrupted

    drawn: list[int] = []
    for seconds in (0.01, 0.12, 5.0):
        drawn.append(draft._rows)
        with pytest.raises(Interrupted):
            draft.step(functools.partial(told_to_stop_after, seconds))
    assert drawn == [256, 256, 128]
    assert draft._rows == 32


@pytest.mark.parametrize(
    ("seconds", "publishing", "due"),
    [
        ([], 0.0, False),
        ([0.1] * 7, 0.0, False),
        ([0.1] * 8, 0.0, True),
        ([0.05] * 8, 0.0, False),
        ([2.5], 0.0, False),
        # who pays for the seconds hears of them soon, however few micro-batches they were
        ([2.5] * 2, 0.0, True),
        ([2.5] * 2, 1.0, False),
        ([2.5] * 8, 1.0, True),
    ],
)
def test_what_was_learned_is_handed_in_after_some_of_it(
    ranks: list[Rank], seconds: list[float], publishing: float, due: bool
) -> None:
    draft = draft_of(ranks[0])
    draft._open.seconds = seconds
    draft._open.publishing = publishing
    assert draft._is_due() is due


@pytest.mark.parametrize("over", ["dismissed", "given up"])
def test_a_merge_of_what_is_over_is_not_made(ranks: list[Rank], over: str) -> None:
    draft = draft_of(ranks[0])
    learned = handed_in(draft, NEW)
    draft.ask(merge(NEW, 1, learned))
    if over == "dismissed":
        draft.dismiss(1)
        draft.begin(school(NEW, training_session=2))
    else:
        draft.begin(school(msgspec.structs.replace(NEW, version=SECOND, root=SECOND)))
    for _ in range(2):
        assert not any(isinstance(frame, DrafterMerged) for frame in draft.step(check))
    draft.dismiss(2)
    draft.dismiss(1)
    draft.ask(merge(NEW, 1, learned))
    assert not draft.active


def test_without_an_answer_to_measure_by_it_is_merged_all_the_same(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    learned = handed_in(draft, NEW)
    monkeypatch.setattr(draft.pool, "canaries", list)
    trained = merged(draft, merge(NEW, 1, learned))
    assert trained.evaluation.answers == 0
    assert gate.judge_evaluation(trained.evaluation) is gate.Judgement.UNMEASURED
    assert msgspec.json.decode(msgspec.json.encode(trained), type=DrafterMerged) == trained
    draft.begin(school(trained.base))
    draft.step(check)
    assert draft.active


def test_a_trunk_that_is_replaced_while_its_member_reads_spoils_nothing(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    second = merged(draft, merge(NEW, 1, handed_in(draft, NEW))).base
    weights, reads = second.weights, draft._read
    assert weights is not None

    def read(*args: Any) -> None:
        draft._blobs.release(weights)
        reads(*args)

    monkeypatch.setattr(draft, "_read", read)
    draft.begin(school(second))
    assert draft.step(check) == []
    assert draft._open.updates == 1


def test_who_spoils_says_so_and_goes_on_when_told_to(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    handed_in(draft, NEW)
    assert draft._member is not None
    learner = draft._member.learner
    learns = learner.learn

    def learn(*args: Any) -> MicroBatchResult:
        return dataclasses.replace(learns(*args), loss=math.nan, skipped=True)

    monkeypatch.setattr(learner, "learn", learn)
    frames: list[FromRank] = []
    while draft.active:
        frames += draft.step(check)
    spoiled = only(frames, DrafterDiverged)
    assert spoiled.base == FIRST
    assert spoiled.error == "5 micro-batches in a row were not finite"
    draft.begin(school(msgspec.structs.replace(NEW, version=SECOND, root=SECOND)))
    assert draft.step(check) == []
    assert draft._open.updates == 1


def test_who_unlearns_says_so_however_short_its_lessons_are(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    handed_in(draft, NEW)
    assert draft._member is not None
    learner = draft._member.learner
    learns = learner.learn
    covered = itertools.chain(itertools.repeat(0.8, 20), itertools.repeat(0.1))

    def learn(*args: Any) -> MicroBatchResult:
        return dataclasses.replace(learns(*args), overlap=(next(covered),))

    monkeypatch.setattr(learner, "learn", learn)
    spoiled: list[FromRank] = []
    for training_session in range(2, 20):
        draft.begin(school(NEW, training_session=training_session))
        for _ in range(3):
            frames = draft.step(check) if draft.active else []
            spoiled += [frame for frame in frames if isinstance(frame, DrafterDiverged)]
        draft.dismiss(training_session)
        if spoiled:
            break
    # a median of fifteen takes more of them than one lesson here has
    assert training_session > 5
    assert only(spoiled, DrafterDiverged).error.startswith("it covers 10% of the policy's guesses")
    draft.begin(
        school(msgspec.structs.replace(NEW, version=SECOND, root=SECOND), training_session=30)
    )
    draft.step(check)
    assert draft.active


def test_who_begins_with_another_trunk_is_not_held_to_what_was_known_before(
    ranks: list[Rank],
) -> None:
    """Somebody else gave the last one up."""
    draft = draft_of(ranks[0])
    handed_in(draft, NEW)

    def covers(part: float) -> str | None:
        for _ in range(20):
            draft._health.record(MicroBatchResult(rows=1, loss=1.0, overlap=(part,), skipped=False))
        return draft._health.divergence()

    assert covers(0.9) is None
    draft.begin(
        school(msgspec.structs.replace(NEW, version=SECOND, root=SECOND), training_session=2)
    )
    assert covers(0.1) is None


@pytest.mark.parametrize("doing", ["handing in", "merging"])
def test_where_nothing_more_can_be_written_it_is_given_up(
    ranks: list[Rank], tmp_path: Path, doing: str
) -> None:
    draft = draft_of(ranks[0])
    learned = handed_in(draft, NEW)
    (tmp_path / "full").touch()
    draft._blobs = Blobs(tmp_path / "full", draft._blobs.flight)
    if doing == "merging":
        draft.ask(merge(NEW, 1, learned))
        frames = draft.step(check)
    else:
        draft.step(check)
        draft._open.publishing = 0.0  # however long the last one took
        frames = draft.dismiss(1)[:1]
    assert "cannot be written" in only(frames, DrafterDiverged).error
    assert not draft.active


def test_room_for_policies_is_left(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three lie there while one is published; and as much as one for what rollouts hand over."""
    draft = draft_of(ranks[0])
    room = 4 * draft._engine.policy_bytes
    monkeypatch.setattr("tlt.blobs.free_bytes", lambda folder: room)
    learned = handed_in(draft, NEW)
    assert (draft._blobs.flight / learned.delta.blob.digest).exists()
    room -= 1
    draft.ask(merge(NEW, 1, learned))
    assert "are kept free for policies" in only(draft.step(check), DrafterDiverged).error


def test_a_drafter_that_cannot_be_used_is_refused_and_the_one_in_use_stays(
    ranks: list[Rank],
) -> None:
    draft = draft_of(ranks[0])
    made = merged(draft, merge(NEW, 1, handed_in(draft, NEW))).drafter
    assert draft.adopt(made) is None
    weights = read_weights(draft._blobs, made.weights)
    name = next(iter(weights))

    def other(**tensors: torch.Tensor) -> BlobRef:
        return put_weights(draft._blobs, {**weights, **tensors}, commit=False)

    torn = other(**{name: weights[name] + 1})
    (draft._blobs.flight / torn.digest).write_bytes(b"torn")
    for changes, complaint in (
        ({"weights": torn}, "4 bytes, "),
        ({"weights": other(**{name: weights[name][:1]})}, "other names or shapes"),
        ({"weights": other(**{name: weights[name] / 0})}, "not finite"),
        ({"architecture": Digest("other")}, "another architecture"),
    ):
        refused = msgspec.structs.replace(made, version=DrafterVersion(2), **changes)
        assert complaint in (draft.adopt(refused) or "")
        assert draft._engine.speculation.drafter_version == 1
    assert draft.adopt(None) is None
    assert draft._engine.speculation.drafter_version is None
    rank = ranks[0]
    rank.handle(DecodePrompts(job=JOB, prompts=tuple(prompt(3, member=m) for m in range(4))))
    assert rank.duties is not None
    while rank.duties.engine.running:
        rank.duties.rollout.step()
    tallies = draft._engine.take_strategy_tallies()
    assert tallies
    assert not any(isinstance(tally.strategy, Draft) for tally in tallies)


def test_who_merges_looks_while_it_writes(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, done = draft_of(ranks[0]), list[str]()
    draft.ask(merge(NEW, 1, handed_in(draft, NEW)))

    def put(*args: Any, **settings: Any) -> BlobRef:
        done.append("put")
        return put_weights(*args, **settings)

    monkeypatch.setattr("tlt.ranks.drafter_trainer.put_weights", put)
    only(draft.step(lambda: done.append("look")), DrafterMerged)
    # before the first; when the file is written; after each stretch of its checksum
    assert done[-7:] == ["look", "put", "look", "look", "put", "look", "look"]


def test_what_a_look_keeps_from_being_handed_in_is_handed_in_next(ranks: list[Rank]) -> None:
    draft = draft_of(ranks[0])
    draft.begin(school(NEW))
    assert draft.step(check) == []
    # long enough to be handed in, and longer than one who has called would wait
    draft._open.seconds, draft._open.publishing = [10.0], 0.06
    files = sorted(draft._blobs.flight.iterdir())
    member = draft._member
    assert member is not None
    expected = member.learner.snapshot().tensors
    for training_session, stop in enumerate(itertools.islice(interrupting_checks(1), 4), 1):
        draft.begin(school(NEW, training_session=training_session))
        with pytest.raises(Interrupted):
            draft.step(stop)
        assert sorted(draft._blobs.flight.iterdir()) == files
        (dismissed,) = draft.dismiss(training_session)
        assert isinstance(dismissed, DrafterTrainingStopped)
        assert dismissed.dropped_seconds == 0.0
    draft.begin(school(NEW, training_session=9))
    learned = only(draft.step(check), DrafterDeltaReady)
    assert (learned.training_session, learned.updates, learned.delta.number) == (9, 1, 0)
    assert (learned.delta.micro_batches, learned.seconds) == (1, 10.0)
    delta = read_weights(draft._blobs, learned.delta.blob)
    root = member.root.tensors
    torch.testing.assert_close({n: root[n] + t for n, t in delta.items()}, expected)


def test_what_looks_have_put_off_often_is_handed_in_whoever_calls(ranks: list[Rank]) -> None:
    draft = draft_of(ranks[0])
    draft.begin(school(NEW))
    assert draft.step(check) == []
    draft._open.seconds = [10.0]
    for _ in range(8):
        with pytest.raises(Interrupted):
            draft.step(interrupt)
    only(draft.step(interrupt), DrafterDeltaReady)


def test_so_it_is_where_they_keep_a_new_trunk_from_being_read(ranks: list[Rank]) -> None:
    draft = draft_of(ranks[0])
    base = merged(draft, merge(NEW, 1, handed_in(draft, NEW))).base
    draft.begin(school(NEW))
    assert draft.step(check) == []
    draft._open.seconds = [10.0]
    draft.begin(school(base))
    for _ in range(8):
        with pytest.raises(Interrupted):
            draft.step(interrupt)
    assert only(draft.step(interrupt), DrafterDeltaReady).delta.base == base.version


def test_it_is_handed_in_where_there_is_nothing_more_to_learn_from(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    draft.begin(school(NEW))
    assert draft.step(check) == []
    draft._open.seconds = [10.0]
    with pytest.raises(Interrupted):
        draft.step(interrupt)
    monkeypatch.setattr(draft.pool, "draw", lambda rows, dice: [])
    only(draft.step(check), DrafterDeltaReady)
    assert draft.step(check) == []


def test_a_merge_that_is_given_up_at_any_look_leaves_no_file(ranks: list[Rank]) -> None:
    draft = draft_of(ranks[0])
    first = handed_in(draft, NEW)
    trained = merged(draft, merge(NEW, 1, first))
    draft.begin(school(trained.base))
    second = handed_in(draft, trained.base)
    draft.ask(merge(trained.base, 2, second))
    files = sorted(draft._blobs.flight.iterdir())
    gone = 0
    for stop in interrupting_checks(1):
        try:
            made = only(draft.step(stop), DrafterMerged)
        except Interrupted:
            gone += 1
            assert sorted(draft._blobs.flight.iterdir()) == files
        else:
            break
    # the trunk, the delta, the sum, the canary, two files and their checksums
    assert gone > 10
    assert made.base.micro_batches == first.updates + second.updates
    assert len(list(draft._blobs.flight.iterdir())) == len(files) + 2


def test_what_is_lost_with_a_mark_is_not_told_as_learned(ranks: list[Rank]) -> None:
    merges, loses = map(draft_of, ranks)
    own, others = handed_in(merges, NEW), handed_in(loses, NEW)
    made = merged(merges, merge(NEW, 1, own, others)).base
    assert loses._member is not None
    loses._member._marks.clear()
    loses._open.seconds = [3.0]
    loses._on_trunk(made, check)
    assert loses._open.updates == 0
    assert loses._dropped >= 3.0


def test_what_was_learned_on_a_trunk_that_is_given_up_is_not_handed_in(
    ranks: list[Rank],
) -> None:
    draft = draft_of(ranks[0])
    draft.begin(school(NEW))
    assert draft.step(check) == []
    draft._open.seconds = [10.0]
    draft.begin(school(msgspec.structs.replace(NEW, version=SECOND, root=SECOND)))
    assert draft.step(check) == []
    draft._open.publishing = 0.0
    learned, dismissed = draft.dismiss(1)
    assert isinstance(learned, DrafterDeltaReady)
    assert learned.updates == learned.delta.micro_batches == 1
    assert isinstance(dismissed, DrafterTrainingStopped)
    assert dismissed.dropped_seconds >= 10.0


def test_a_loss_that_is_no_number_is_not_spoken_of(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = draft_of(ranks[0])
    first = handed_in(draft, NEW)
    assert draft._member is not None
    learner = draft._member.learner
    learns, losses = learner.learn, iter([math.nan, None, math.inf])

    def learn(*args: Any) -> MicroBatchResult:
        loss, training_session = next(losses), learns(*args)
        if loss is None:
            return training_session
        return dataclasses.replace(training_session, loss=loss, skipped=True)

    monkeypatch.setattr(learner, "learn", learn)
    assert not [frame for _ in range(3) for frame in draft.step(check)]
    draft._open.publishing = 0.0
    learned, dismissed = draft.dismiss(1)
    assert isinstance(learned, DrafterDeltaReady)
    assert (first.updates, learned.updates) == (2, 1)
    assert math.isfinite(learned.loss)
    assert isinstance(dismissed, DrafterTrainingStopped)
    assert dismissed.dropped_seconds > 0.0
