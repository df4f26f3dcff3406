"""Answers in turns: what the policy saw, what it learns from, and what survives a fault."""

import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.environments.conversing import Conversing, conversing, environment_spec, prompts
from tests.ranks.members import decoding_of
from tests.ranks.ranks import INCARNATION, WORKER
from tests.ranks.test_cut_answers import START
from tests.samples import JOB
from tests.waiting import wait_until
from tlt.base.id_types import Step
from tlt.blobs.answer_files import Answer
from tlt.engine.base import Request
from tlt.protocol.commands import CutAnswers
from tlt.protocol.events import WorkerFailed
from tlt.protocol.rank_messages import BeginTrajectory, ContinueTrajectory
from tlt.protocol.shared_values import SizingFacts
from tlt.ranks.request_settings import noise_key, sampling
from tlt.ranks.size_choice import limit_context
from tlt.spec.config import DataSpec, JobSpec, RolloutSpec, SpeculationSpec
from tlt.spec.environment import EnvironmentSpec
from tlt.spec.reward import RewardSpec
from tlt.spec.spec_files import load_job_spec

ROWS = [{"turns": 4}, {"turns": 2}, {"turns": 3}]


async def held(folder: Path, spec: JobSpec, rows: list[Any], ranks: int = 1) -> dict[Any, Answer]:
    async with conversing(folder, spec, ranks) as found:
        begun = prompts(spec, folder, rows)
        found.begin(begun)
        return await found.until_finished(len(begun))


async def test_the_policy_goes_on_from_exactly_the_tokens_before(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    async with conversing(tmp_path, spec) as found:
        begun = prompts(spec, tmp_path, ROWS)
        found.begin(begun)
        answers = await found.until_finished(6)
        events = found.finished
        for issued in begun:
            key = issued.prompt, issued.member
            answer, event = answers[key], events[key]
            turns = answer.policy_turns
            assert len(turns) == ROWS[issued.prompt]["turns"]
            drawn = sum(end - first for first, end in turns)
            assert len(answer.logprobs) == event.length == drawn
            # the environment's two digits and its plus stand between two turns
            assert all(after[0] - before[1] == 3 for before, after in pairwise(turns))
            assert event.prompt_length == len(answer.prompt) + len(answer.tokens) - drawn
            assert event.stop == "stop"
            assert answer.reward == len(turns)
            for spans in (answer.policies, answer.drafters, answer.batches):
                assert sum(span.tokens for span in spans) == drawn
            _assert_drawn_at(found, spec, issued, answer)


def _assert_drawn_at(found: Conversing, spec: JobSpec, issued: Any, answer: Answer) -> None:
    """Each turn is what the policy writes if all tokens before it are its prompt."""
    engine = decoding_of(found.ranks[0].local.rank).engine
    for first, end in answer.policy_turns:
        engine.submit(
            [
                Request(
                    id=10_000 + first,
                    prompt=(*answer.prompt, *answer.tokens[:first]),
                    key=noise_key(spec, issued),
                    sampling=sampling(spec, issued),
                    max_new_tokens=end - first,
                    stop_tokens=frozenset(),
                )
            ]
        )
        (done,) = _run(engine)
        assert done.tokens == answer.tokens[first:end]
        at = sum(e - f for f, e in answer.policy_turns if e <= first)
        expected = answer.logprobs[at : at + end - first]
        assert done.logprobs == pytest.approx(expected, abs=1e-4)


def _run(engine: Any) -> list[Any]:
    done: list[Any] = []
    while engine.running:
        done += engine.step()
    return done


async def test_shows_who_said_what(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    answers = await held(tmp_path, spec, [{"turns": 3, "opening": "34+"}])
    for answer in answers.values():
        roles = [turn.role for turn in answer.turns]
        assert roles == ["user", *["assistant", "user"] * 3]
        assert answer.turns[0].text == "34+"
        # the last message ends the answer, so that the policy doesn't see it
        assert answer.text == answer.turns[-2].text
        # the prompt is the opening, behind the token that begins a text
        assert len(answer.prompt) == 4


@pytest.mark.parametrize("speculates", [False, True])
async def test_answers_do_not_depend_on_ranks_or_speculation(
    tmp_path: Path, speculates: bool
) -> None:
    expected = await held(tmp_path / "one", environment_spec(tmp_path / "one"), ROWS)
    folder = tmp_path / "others"
    spec = environment_spec(folder)
    if speculates:
        speculation = SpeculationSpec(mode="adaptive", depths=())
        spec = msgspec.structs.replace(spec, speculation=speculation)
    found = await held(folder, spec, ROWS, ranks=2)
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        assert answer.tokens == expected[key].tokens
        assert answer.turns == expected[key].turns
        assert answer.reward == expected[key].reward
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)


async def test_members_of_a_group_meet_the_same_environment(tmp_path: Path) -> None:
    """They may say something else; what the environment drew is the same."""
    spec = environment_spec(tmp_path, max_turns=2)
    answers = await held(tmp_path, spec, [{"turns": 9}] * 4)
    drawn = {key: answer.turns[-1].text[1] for key, answer in answers.items()}
    assert all(drawn[index, 0] == drawn[index, 1] for index in range(4))
    assert len(set(drawn.values())) > 1


async def test_ends_after_the_most_turns(tmp_path: Path) -> None:
    answers = await held(tmp_path, environment_spec(tmp_path, max_turns=3), [{"turns": 9}])
    assert [len(answer.policy_turns) for answer in answers.values()] == [3, 3]
    assert {answer.reward for answer in answers.values()} == {3.25}


async def test_ends_where_there_is_no_room(tmp_path: Path) -> None:
    """All turns together have `max_new_tokens`."""
    spec = environment_spec(tmp_path)
    rollout = msgspec.structs.replace(spec.rollout, max_new_tokens=12)
    spec = msgspec.structs.replace(spec, rollout=rollout)
    async with conversing(tmp_path, spec) as found:
        found.begin(prompts(spec, tmp_path, [{"turns": 50}]))
        answers = await found.until_finished(2)
        for key, event in found.finished.items():
            assert event.stop == "length"
            assert event.length == len(answers[key].logprobs) <= 12
            # no token stands behind the policy's last one
            assert answers[key].policy_turns[-1][1] == len(answers[key].tokens)
            assert answers[key].reward is not None
            assert answers[key].reward % 1 == 0.5


async def test_an_opening_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    answers = await held(tmp_path, spec, [{"turns": 1, "opening": "1" * 600}])
    for answer in answers.values():
        assert answer.reward is None
        assert "601 tokens, of a context of 512" in str(answer.error)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"broken": True}, "RuntimeError: no world"),
        ({"fails_at": 2}, "KeyError: 'x'"),
        ({"dies_at": 2}, "the environment's process ended"),
    ],
)
async def test_an_environment_that_fails_is_the_answer_s_error(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    answers = await held(tmp_path, environment_spec(tmp_path), [{"turns": 3, **row}, {"turns": 2}])
    assert [answers[0, member].reward for member in range(2)] == [None, None]
    assert all(complaint in str(answers[0, member].error) for member in range(2))
    assert answers[1, 0].reward == 2


async def test_an_answer_is_the_same_after_its_environment_was_killed(tmp_path: Path) -> None:
    expected = await held(tmp_path / "sound", environment_spec(tmp_path / "sound"), [{"turns": 4}])
    folder = tmp_path / "killed"
    spec = environment_spec(folder)
    rows = [{"turns": 4, "killed": str(folder / "mark")}]
    file = folder / "mark"
    # its own folder and those of the spec are all that an environment may write to
    environment: Any = msgspec.structs.replace(spec.environment, writable=(str(folder),))
    found = await held(folder, msgspec.structs.replace(spec, environment=environment), rows)
    assert file.exists()
    for key, answer in found.items():
        assert answer.tokens == expected[key].tokens
        assert answer.reward == 4


async def test_an_answer_that_waits_takes_no_slot(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    spec = environment_spec(tmp_path)
    async with conversing(tmp_path, spec) as found:
        begun = prompts(spec, tmp_path, [{"turns": 2, "gate": str(gate)}])
        found.begin(begun)
        keys = [(p.step, p.purpose, p.prompt, p.member) for p in begun]

        async def all_wait() -> bool:
            await found.advance()
            return len(found.turns) == 2

        while not await all_wait():
            pass
        assert all(found.conversations.is_waiting(key) for key in keys)
        assert found.changed.is_set()
        assert decoding_of(found.ranks[0].local.rank).engine.running == 0
        gate.touch()
        await found.until_finished(2)
        assert not any(found.conversations.is_waiting(key) for key in keys)


async def test_a_cut_gives_up_answers_wherever_they_are(tmp_path: Path) -> None:
    """One decodes, one waits for its environment, one hasn't begun."""
    spec, gate = environment_spec(tmp_path), tmp_path / "gate"
    async with conversing(tmp_path, spec) as found:
        rows = [{"turns": 60}, {"turns": 2, "gate": str(gate)}, {"turns": 2}]
        begun = prompts(spec, tmp_path, rows)
        found.begin(begun[:4])
        while not any(turn.prompt == 1 for turn in found.turns):
            await found.advance()
        found.begin(begun[4:])
        found.ranks[0].local.rank.handle(
            CutAnswers(worker=WORKER, incarnation=INCARNATION, job=JOB)
        )
        while len(found.cut) < 6:
            await found.advance()
        assert {(event.prompt, event.member) for event in found.cut} == {
            (prompt.prompt, prompt.member) for prompt in begun
        }
        assert all(event.answer is None for event in found.cut)
        gate.touch()
        for _ in range(50):
            await found.advance()
        assert found.finished == {}


async def test_an_answer_of_an_earlier_step_is_given_back(tmp_path: Path) -> None:
    """Its environment was still being reset when its step ended."""
    spec = environment_spec(tmp_path)
    async with conversing(tmp_path, spec) as found:
        found.ranks[0].local.rank.handle(msgspec.structs.replace(START, step=Step(1)))
        found.begin(prompts(spec, tmp_path, [{"turns": 1}]))
        while len(found.cut) < 2:
            await found.advance()
        assert found.turns == []


async def test_what_an_environment_says_has_room_where_sizes_are_chosen(tmp_path: Path) -> None:
    """The longest prompt and answer aren't all that a context holds."""
    spec = environment_spec(tmp_path)
    facts = SizingFacts(ranks=1, answers=4, longest_prompt=3)
    assert limit_context(spec, facts) == spec
    alone = msgspec.structs.replace(
        spec, environment=msgspec.UNSET, reward=RewardSpec(kind="numeric")
    )
    assert limit_context(alone, facts).policy.max_context == 203


async def test_nothing_is_tokenised_again(tmp_path: Path) -> None:
    """The worker tells its rank new messages only."""
    spec = environment_spec(tmp_path)
    async with conversing(tmp_path, spec) as found:
        found.begin(prompts(spec, tmp_path, [{"turns": 4}]))
        await found.until_finished(2)
        told = found.ranks[0].told
    assert sum(isinstance(message, BeginTrajectory) for message in told) == 2
    following = [message for message in told if isinstance(message, ContinueTrajectory)]
    assert [len(message.messages) for message in following] == [1] * 6


async def test_an_environment_that_no_longer_loads_fails_the_job(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    (tmp_path / "game.py").write_text("import missing_module")
    async with conversing(tmp_path, spec) as found:
        found.begin(prompts(spec, tmp_path, [{"turns": 1}])[:1])
        running = asyncio.create_task(found.conversations.run())
        try:
            await wait_until(lambda: bool(found.events))
        finally:
            running.cancel()
    (event,) = found.events
    assert isinstance(event, WorkerFailed)
    assert "missing_module" in event.error


def test_a_spec_with_an_environment(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    with pytest.raises(ValueError, match="partial must be 0"):
        msgspec.structs.replace(spec, rollout=RolloutSpec(partial=0.5))
    overlapping = msgspec.structs.replace(spec.algorithm, staleness=1)
    with pytest.raises(ValueError, match="staleness must be 0"):
        msgspec.structs.replace(spec, algorithm=overlapping)
    with pytest.raises(ValueError, match="needs an environment"):
        msgspec.structs.replace(spec, environment=msgspec.UNSET)


def test_a_spec_with_tasks_of_verifiers(tmp_path: Path) -> None:
    spec = environment_spec(tmp_path)
    section = EnvironmentSpec(kind="verifiers", python="venv/python", taskset="textarena")
    assert section.verifiers_taskset == {"id": "textarena"}
    tasks = DataSpec(train="taskset:0:9", eval="taskset:9:")
    spec = msgspec.structs.replace(spec, environment=section, data=tasks)
    with pytest.raises(ValueError, match=r"write taskset: instead of rows\.jsonl"):
        msgspec.structs.replace(spec, data=DataSpec(train="taskset:", eval="rows.jsonl"))
    with pytest.raises(ValueError, match=r"taskset: needs environment\.kind verifiers"):
        msgspec.structs.replace(spec, environment=environment_spec(tmp_path).environment)
    for wrong, complaint in (
        ({"python": None}, "needs python"),
        ({"taskset": None}, "needs a taskset"),
        ({"taskset": {"game": "Hangman-v0"}}, "needs a taskset"),
        ({"factory": "x.py:y"}, "neither a factory"),
        ({"kind": "agent", "factory": "x.py:y"}, "need kind: verifiers"),
    ):
        with pytest.raises(ValueError, match=complaint):
            msgspec.structs.replace(section, **wrong)


def test_an_interpreter_keeps_its_links(tmp_path: Path) -> None:
    """A resolved one would forget its packages."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    file = tmp_path / "job.yaml"
    file.write_text(
        f"policy: {{path: {tmp_path}}}\n"
        "data: {train: 'taskset:0:9', answer_key: null}\n"
        "environment: {kind: verifiers, taskset: textarena, python: bin/python}\n"
        "reward: {kind: environment}\n"
        "algorithm: {steps: 1, prompts_per_step: 1, group_size: 2}\n"
    )
    found = load_job_spec(file).environment
    assert found
    assert found.python == f"{tmp_path}/bin/python"
