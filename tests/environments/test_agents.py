"""Agents ask for turns over HTTP: what they get is what the rank has written, and is learned."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.environments.conversing import conversing, environment_spec, prompts
from tests.environments.test_conversations import ROWS
from tlt.blobs.answer_files import Answer
from tlt.protocol.events import RolloutFinished
from tlt.spec.config import JobSpec, SpeculationSpec
from tlt.spec.environment import EnvironmentSpec

CODE = """
import json, os, sys
from pathlib import Path

import openai


def ask(messages, **more):
    client = openai.OpenAI(max_retries=0)
    found = client.chat.completions.create(
        model="policy", messages=messages, logprobs=True,
        extra_body={"return_token_ids": True}, **more,
    )
    with open(RECORD, "a") as file:
        file.write(found.model_dump_json() + chr(10))
    return found.choices[0].message


def talk(row, seed):
    messages = [{"role": "user", "content": "12+"}]
    for turn in range(row["turns"]):
        messages += [ask(messages), {"role": "user", "content": f"{seed % 10}4+"}]
    return turn + 1


async def branches(row, seed):
    main = [{"role": "user", "content": "12+"}]
    main += [ask(main), {"role": "user", "content": "3+"}]
    helper = [{"role": "user", "content": "45+"}]
    helper += [ask(helper), {"role": "user", "content": "6+"}]
    ask(main)
    ask(helper)
    ask(main[:1])
    return 1


def unlimited(row, seed):
    messages = [{"role": "user", "content": "12+"}]
    while True:
        messages += [ask(messages), {"role": "user", "content": "4+"}]


def stubborn(row, seed):
    '''Ask for more than fits, again and again.'''
    ask([{"role": "user", "content": "12+"}])
    while True:
        try:
            ask([{"role": "user", "content": "1" * 5000}])
        except openai.BadRequestError as error:
            if error.code == "max_turns":
                raise


def strange(row, seed):
    '''Send tokens that the policy doesn't have, then ask as others do.'''
    try:
        openai.OpenAI(max_retries=0).post(
            os.environ["OPENAI_BASE_URL"] + "/inference/v1/generate",
            cast_to=object, body={"token_ids": [7, 1_000_000]},
        )
    except openai.BadRequestError:
        return talk({"turns": 1}, seed)


def silent(row, seed):
    return 1.0


def killed(row, seed):
    mark = Path(row["mark"])
    if not mark.exists():
        mark.touch()
        ask([{"role": "user", "content": "7+"}])
        os._exit(3)
    return talk({"turns": 2}, seed)
"""


def agent_spec(folder: Path, function: str, **changes: Any) -> JobSpec:
    spec = environment_spec(folder)
    file = folder / "agent.py"
    file.write_text(CODE.replace("RECORD", repr(str(folder / "record"))))
    section = EnvironmentSpec(
        kind="agent", factory=f"{file}:{function}", writable=(str(folder),), **changes
    )
    return replace(spec, environment=section)


async def held(
    folder: Path, spec: JobSpec, rows: list[Any], ranks: int = 1
) -> dict[Any, tuple[RolloutFinished, Answer]]:
    async with conversing(folder, spec, ranks) as found:
        begun = prompts(spec, folder, rows)
        found.begin(begun)
        answers = await found.until_finished(len(begun))
        return {key: (found.finished[key], answer) for key, answer in answers.items()}


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record").read_text().splitlines()]


async def test_an_agent_gets_the_tokens_that_are_learned(tmp_path: Path) -> None:
    found = await held(tmp_path, agent_spec(tmp_path, "talk"), ROWS)
    said: dict[tuple[int, ...], dict[str, Any]] = {
        (*each["prompt_token_ids"], *each["choices"][0]["token_ids"]): each
        for each in recorded(tmp_path)
    }
    for (prompt, _), (event, answer) in found.items():
        assert answer.error is None
        assert answer.reward == len(answer.policy_turns) == ROWS[prompt]["turns"]
        assert not answer.branches
        assert event.stop == "stop"
        whole, at = (*answer.prompt, *answer.tokens), len(answer.prompt)
        logprobs = iter(answer.logprobs)
        for first, end in answer.policy_turns:
            given = said[whole[: at + end]]
            assert len(given["prompt_token_ids"]) == at + first
            content = given["choices"][0]["logprobs"]["content"]
            assert [each["logprob"] for each in content] == [next(logprobs) for _ in content]
            assert given["usage"]["completion_tokens"] == end - first


async def test_the_same_seed_gives_the_same_answers(tmp_path: Path) -> None:
    """Whatever the number of ranks, with speculation or without, and with agents killed once."""
    alone = await held(tmp_path / "a", agent_spec(tmp_path / "a", "talk"), ROWS)
    speculation = SpeculationSpec(mode="adaptive", depths=())
    for ranks, folder in ((2, tmp_path / "b"), (4, tmp_path / "e")):
        spec = replace(agent_spec(folder, "talk"), speculation=speculation)
        others = await held(folder, spec, ROWS, ranks=ranks)
        for key, (_, answer) in alone.items():
            assert others[key][1].tokens == answer.tokens
            assert others[key][1].logprobs == pytest.approx(answer.logprobs, abs=1e-4)
    rows = [{"turns": 2, "mark": str(tmp_path / "c" / "mark")}]
    killed = await held(tmp_path / "c", agent_spec(tmp_path / "c", "killed"), rows)
    short = await held(tmp_path / "d", agent_spec(tmp_path / "d", "talk"), rows)
    for key, (_, answer) in short.items():
        assert killed[key][1].error is None
        assert killed[key][1].tokens == answer.tokens


async def test_a_request_that_goes_on_from_nothing_begins_a_branch(tmp_path: Path) -> None:
    found = await held(tmp_path, agent_spec(tmp_path, "branches"), [{"turns": 1}])
    for event, answer in found.values():
        assert answer.error is None
        first, helper, again = (answer, *answer.branches)
        assert [len(part.policy_turns) for part in (first, helper, again)] == [2, 2, 1]
        assert first.prompt == again.prompt != helper.prompt
        # another branch has other noise
        assert again.tokens != first.tokens[: len(again.tokens)]
        assert event.length == sum(len(part.logprobs) for part in (first, helper, again))
        # the policy's text has no special tokens, the turn has
        assert answer.text == re.sub("<[a-z]+>", "", again.turns[-1].text)


@pytest.mark.parametrize(
    ("changes", "rollout", "stop"),
    [({"max_turns": 3}, {}, "turns"), ({}, {"max_new_tokens": 12}, "length")],
)
async def test_an_agent_that_gives_up_at_a_limit_gets_nothing(
    tmp_path: Path, changes: dict[str, Any], rollout: dict[str, Any], stop: str
) -> None:
    spec = agent_spec(tmp_path, "unlimited", **changes)
    spec = replace(spec, rollout=replace(spec.rollout, **rollout))
    for event, answer in (await held(tmp_path, spec, [{}])).values():
        assert (event.stop, answer.reward, answer.error) == (stop, 0.0, None)


async def test_an_agent_that_asks_again_and_again_ends(tmp_path: Path) -> None:
    found = await held(tmp_path, agent_spec(tmp_path, "stubborn", max_turns=4), [{}])
    for event, answer in found.values():
        assert (event.stop, answer.reward) == ("turns", 0.0)
        assert not answer.branches


async def test_tokens_that_the_policy_lacks_are_refused(tmp_path: Path) -> None:
    for _, answer in (await held(tmp_path, agent_spec(tmp_path, "strange"), [{}])).values():
        assert (answer.reward, answer.error) == (1.0, None)


async def test_an_agent_that_asks_for_nothing_has_failed(tmp_path: Path) -> None:
    for _, answer in (await held(tmp_path, agent_spec(tmp_path, "silent"), [{}])).values():
        assert answer.error == "the agent has got no turn"


SHELL = """
read -r row
answer=$(curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \\
    -d '{"messages": [{"role": "user", "content": "12+"}], "max_tokens": 5}')
echo "$answer" >> said
test "$(cat said | wc -l)" = 1
echo 0.5 > "$TLT_REWARD"
"""


async def test_a_program_may_be_an_agent(tmp_path: Path) -> None:
    spec = agent_spec(tmp_path, "talk")
    section = EnvironmentSpec(kind="agent", command=("sh", "-ec", SHELL))
    found = await held(tmp_path, replace(spec, environment=section), [{}])
    for _, answer in found.values():
        assert (answer.reward, answer.error) == (0.5, None)
        assert 1 <= len(answer.tokens) <= 5
