"""An answer that is cut goes on from its tokens, as if it had never been cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from tests.ranks.members import decoding_of
from tests.ranks.ranks import INCARNATION, WORKER, LocalRank, local_rank, open_job, with_policy
from tests.samples import JOB, prompt
from tlt.base.id_types import Attempt, Epoch, PolicyVersion, Step
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.models.decoder_from_folder import load_decoder
from tlt.protocol.commands import CutAnswers, PromptIssued, StartRollout
from tlt.protocol.events import RolloutCut, RolloutFinished
from tlt.protocol.rank_messages import DecodePrompts
from tlt.protocol.refs import PolicyRef
from tlt.spec.config import RolloutSpec

CUT = CutAnswers(worker=WORKER, incarnation=INCARNATION, job=JOB)
START = StartRollout(
    worker=WORKER,
    incarnation=INCARNATION,
    job=JOB,
    epoch=Epoch(1),
    step=Step(1),
    purpose="train",
    policy=PolicyRef(version=PolicyVersion(0), weights=None),
    drafter=None,
    requeues=0,
    share=8,
    keep_answers=False,
    speculate=True,
)
PROMPTS = [prompt(7, member=member) for member in range(3)]


def opened(
    local: LocalRank, folder: Path, staleness: Literal[0, 1] = 0, **rollout: Any
) -> LocalRank:
    spec = with_policy(folder, rollout=RolloutSpec(max_new_tokens=60, slots=2, **rollout))
    algorithm = msgspec.structs.replace(spec.algorithm, staleness=staleness)
    spec = msgspec.structs.replace(spec, algorithm=algorithm)
    local.rank.handle(open_job(folder, spec))
    return local


def submit(local: LocalRank, prompts: Sequence[PromptIssued]) -> None:
    local.rank.handle(DecodePrompts(job=JOB, prompts=tuple(prompts)))


def decode(local: LocalRank, steps: int = 1000) -> dict[int, RolloutFinished]:
    """Decode so many steps, and return what finished by member."""
    for _ in range(steps):
        if decoding_of(local.rank).engine.running:
            local.rank.compute()
    return {e.member: e for e in local.sent() if isinstance(e, RolloutFinished)}


def cut(local: LocalRank) -> dict[int, RolloutCut]:
    local.rank.handle(CUT)
    return {event.member: event for event in local.sent() if isinstance(event, RolloutCut)}


def go_on(local: LocalRank, events: dict[int, RolloutCut]) -> None:
    """Submit what was cut again, in the next batch."""
    local.rank.handle(START)
    submit(
        local,
        [
            msgspec.structs.replace(
                PROMPTS[member], attempt=Attempt(event.attempt + 1), prefix=event.answer
            )
            for member, event in events.items()
        ],
    )


def whole(folder: Path, **rollout: Any) -> dict[int, Answer]:
    """Return the answers that nothing cuts."""
    with local_rank(folder) as local:
        submit(opened(local, folder, **rollout), PROMPTS)
        return {m: AnswerFiles(folder).read(e.answer) for m, e in decode(local).items()}


def assert_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert found.text == expected.text
    assert found.prompt == expected.prompt
    for spans in (found.policies, found.drafters, found.origins, found.batches):
        assert sum(span.tokens for span in spans) == len(found.tokens)


def test_an_answer_is_the_same_as_without_cuts(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    with local_rank(tmp_path) as local:
        submit(opened(local, tmp_path), PROMPTS)
        finished: dict[int, RolloutFinished] = {}
        for steps in (9, 14):
            finished |= decode(local, steps)
            events = cut(local)
            assert events.keys() == expected.keys() - finished.keys()
            assert decoding_of(local.rank).engine.running == 0
            go_on(local, events)
        finished |= decode(local)
        assert finished.keys() == expected.keys()
        for member, event in finished.items():
            assert_same(AnswerFiles(tmp_path).read(event.answer), expected[member])
            assert event.length == len(expected[member].tokens)


def test_an_answer_without_tokens_keeps_what_it_had(tmp_path: Path) -> None:
    """The third one waits for a slot when it is cut again."""
    with local_rank(tmp_path) as local:
        submit(opened(local, tmp_path), PROMPTS[:2])
        decode(local, 9)
        first = cut(local)
        local.rank.handle(START)
        again = msgspec.structs.replace(PROMPTS[0], attempt=Attempt(1), prefix=first[0].answer)
        submit(local, [*PROMPTS[1:], again])
        decode(local, 3)
        second = cut(local)
        assert second[0].answer == first[0].answer
        assert (second[0].attempt, second[0].decode_seconds) == (1, 0.0)


def test_prompts_after_a_cut_are_given_back(tmp_path: Path) -> None:
    """The worker may have read them before it was told."""
    with local_rank(tmp_path) as local:
        opened(local, tmp_path).rank.handle(CUT)
        submit(local, PROMPTS)
        given_back = [event for event in local.sent() if isinstance(event, RolloutCut)]
        assert [(event.member, event.answer) for event in given_back] == [
            (0, None),
            (1, None),
            (2, None),
        ]
        assert decoding_of(local.rank).engine.running == 0
        go_on(local, dict(enumerate(given_back)))
        assert decode(local).keys() == {0, 1, 2}


def test_evaluations_are_not_cut(tmp_path: Path) -> None:
    with local_rank(tmp_path) as local:
        held_out = msgspec.structs.replace(PROMPTS[0], purpose="eval")
        submit(opened(local, tmp_path), [held_out, PROMPTS[1]])
        decode(local, 5)
        assert cut(local).keys() == {1}
        assert decode(local).keys() == {0}


def test_a_stop_string_is_found_where_the_cut_was(tmp_path: Path) -> None:
    text = whole(tmp_path / "free")[0].text
    stop = text[20:24]
    expected = whole(tmp_path / "whole", stop=[stop])
    for steps in range(1, len(expected[0].tokens)):
        folder = tmp_path / str(steps)
        with local_rank(folder) as local:
            submit(opened(local, folder, stop=[stop]), PROMPTS[:1])
            decode(local, steps)
            go_on(local, cut(local))
            (event,) = decode(local).values()
        assert_same(AnswerFiles(folder).read(event.answer), expected[0])
        assert event.stop == "stop"


def test_an_answer_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    with local_rank(tmp_path) as local:
        submit(opened(local, tmp_path), PROMPTS[:1])
        decode(local, 9)
        events = cut(local)
        for file in (tmp_path / "answers").iterdir():
            file.write_bytes(b"")
        go_on(local, events)
        (event,) = decode(local).values()
        assert_same(AnswerFiles(tmp_path).read(event.answer), expected[0])


def test_a_step_has_its_own_weights(tmp_path: Path) -> None:
    """Prompts of another one are given back where two steps are decoded at once."""
    expected = whole(tmp_path / "whole")
    with local_rank(tmp_path) as local:
        opened(local, tmp_path, staleness=1)
        other = decoding_of(local.rank).rollout
        newer = {
            name: 2 * weight for name, weight in load_decoder(tmp_path / "policy").weights.items()
        }
        other.swap_weights(PolicyVersion(1), newer)
        # the job began with version 0, which no blob holds
        local.rank.handle(msgspec.structs.replace(START, step=PROMPTS[0].step))
        assert decoding_of(local.rank).engine.version == 0
        late = [msgspec.structs.replace(each, step=Step(2)) for each in PROMPTS[:1]]
        submit(local, [*late, *PROMPTS])
        given_back = [event for event in local.sent() if isinstance(event, RolloutCut)]
        assert [(event.step, event.member, event.answer) for event in given_back] == [(2, 0, None)]
        finished = decode(local)
        assert finished.keys() == expected.keys()
        for member, event in finished.items():
            assert_same(AnswerFiles(tmp_path).read(event.answer), expected[member])
