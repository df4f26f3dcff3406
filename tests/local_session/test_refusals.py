"""A job that can't run as it is written fails with one line that names the cause."""

import json
from collections.abc import Callable

import msgspec
import pytest

from tests.local_session.session import LocalSession, changed, write_spec
from tlt.spec.config import JobSpec
from tlt.spec.reward import RewardSpec

FILES = {
    "empty": "",
    "malformed": '{"prompt": "01+01=", "answer": "2"}\n{"prompt": \n',
    "keyless": '{"question": "01+01="}\n',
    "long": json.dumps({"prompt": "1" * 600, "answer": "1"}) + "\n",
}


def other_family(session: LocalSession, spec: JobSpec) -> JobSpec:
    folder = session.folder / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    return changed(spec, policy={"path": str(folder)})


def missing_function(session: LocalSession, spec: JobSpec) -> JobSpec:
    reward = RewardSpec(kind="function", function="no.such.module:reward")
    return msgspec.structs.replace(spec, reward=reward)


def with_file(name: str) -> Callable[[LocalSession, JobSpec], JobSpec]:
    def change(session: LocalSession, spec: JobSpec) -> JobSpec:
        file = session.folder / f"{name}.jsonl"
        file.write_text(FILES[name])
        return changed(spec, data={"train": str(file)}, policy={"max_context": 512})

    return change


CASES = {
    "GPT2LMHeadModel": other_family,
    "reward.function: no.such.module cannot be imported": missing_function,
    "empty.jsonl: it has no rows": with_file("empty"),
    "malformed.jsonl:2: not valid JSON": with_file("malformed"),
    "keyless.jsonl:1: no key 'prompt'": with_file("keyless"),
    "long.jsonl: all prompts have more than": with_file("long"),
}


async def test_names_the_cause_of_a_failed_job(alone: LocalSession, spec: JobSpec) -> None:
    for complaint, change in CASES.items():
        record = await alone.ended(await alone.submit(change(alone, spec)))
        assert record.status == "failed"
        assert complaint in str(record.error)
        assert "\n" not in str(record.error)


async def test_exits_with_1_after_a_failed_job(alone: LocalSession, spec: JobSpec) -> None:
    broken = write_spec(alone, changed(spec, policy={"path": str(alone.folder)}))
    failed = await alone.tlt("submit", broken, "--wait", code=1)
    (line,) = failed.stderr.strip().splitlines()
    assert "config.json" in line


@pytest.mark.parametrize("command", ["logs", "cancel"])
async def test_names_an_unknown_job(alone: LocalSession, command: str) -> None:
    refused = await alone.tlt(command, "ghost-1", code=2)
    assert "there is no job 'ghost-1'" in refused.stderr
