"""A job whose answers have several turns, and what must be true of it at its end."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.live import Live, count_dropped, counted_rollouts, write_spec
from tlt.blobs.answer_files import Answer, AnswerFiles
from tlt.protocol.events import RolloutFinished
from tlt.runs.run_folder_reader import open_ledger

CODE = """
import asyncio


class Game:
    async def reset(self, row, seed):
        self.seed = seed

    async def step(self, message):
        await asyncio.sleep(0.2)
        return [{"role": "user", "content": f"{len(message['content']) % 10}+"}], False

    async def reward(self, trajectory):
        assert trajectory["stop"] in ("turns", "length")
        return sum(m["content"].count("1") for m in trajectory["messages"]) % 5 / 4
"""
STEPS, PROMPTS, GROUP, TURNS = 3, 4, 4, 3
# knows the `openai` package alone, and asks for the parts of a sum in conversations of their own
AGENT = Path(__file__).parents[2] / "examples" / "agent" / "job.yaml"
AGENT_CHANGES = (
    f"algorithm.steps={STEPS}",
    f"algorithm.prompts_per_step={PROMPTS}",
    f"algorithm.group_size={GROUP}",
    "algorithm.eval_every=0",
)


def write_game(home: Path, raw_spec: dict[str, Any]) -> Path:
    """Write a job of a policy that ends its turns with some digits only."""
    (home / "game.py").write_text(CODE)
    spec = {
        **raw_spec,
        "name": "game",
        "rollout": {"max_new_tokens": 120, "slots": 4, "stop": ["3", "7", ";"]},
        "environment": {"factory": "game.py:Game", "max_turns": TURNS},
        "reward": {"kind": "environment"},
        "algorithm": {
            **raw_spec["algorithm"],
            "steps": STEPS,
            "prompts_per_step": PROMPTS,
            "group_size": GROUP,
        },
    }
    return write_spec(home, spec, "game.yaml")


def environments_of(live: Live) -> list[int]:
    """Return the processes of the session's environments, the servers first."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            command = (folder / "cmdline").read_bytes()
            session = str(live.home).encode() in (folder / "environ").read_bytes()
            if session and b"environment_fork_server" in command:
                found.append(int(folder.name))
    return sorted(found)


def conversations_of(live: Live) -> list[int]:
    """Return the processes that each have an answer to themselves: the servers' children."""
    found = environments_of(live)
    servers = [pid for pid in found if _parent(pid) in found]
    return [pid for pid in servers if _parent(pid) in servers]


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def answers(live: Live, job: str) -> Iterator[tuple[RolloutFinished, Answer]]:
    files = AnswerFiles(live.runs / job)
    for entry in live.journal(job):
        if isinstance(entry.event, RolloutFinished):
            yield entry.event, files.read(entry.event.answer)


def assert_complete(live: Live, job: str) -> None:
    assert live.await_end(job, 200.0)["status"] == "done", live.job(job)["error"]
    counted = counted_rollouts(live.journal(job), open_ledger(live.runs / job))
    assert len(counted) == len(set(counted)) == STEPS * PROMPTS * GROUP
    assert count_dropped(live.journal(job)) == 0
    assert [step.rollouts for step in live.fold(job).steps] == [PROMPTS * GROUP] * STEPS


def assert_learned_what_was_sampled(live: Live, job: str) -> None:
    """The learner's log-probs of the policy's tokens are the engine's."""
    several = 0
    for event, answer in answers(live, job):
        drawn = sum(end - first for first, end in answer.policy_turns)
        assert event.length == len(answer.logprobs) == drawn
        assert event.prompt_length + drawn == len(answer.prompt) + len(answer.tokens)
        several += len(answer.policy_turns) > 1
    assert several >= PROMPTS * GROUP
    _assert_equal_logprobs(live, job)


def assert_learned_from_the_agent(live: Live, job: str) -> None:
    """All conversations of an answer are in it, and the learner's log-probs are the engine's."""
    conversations = 0
    for event, answer in answers(live, job):
        assert answer.error is None
        parts = (answer, *answer.branches)
        assert event.length == sum(len(part.logprobs) for part in parts)
        conversations += len(parts)
    assert conversations > STEPS * PROMPTS * GROUP
    _assert_equal_logprobs(live, job)


def _assert_equal_logprobs(live: Live, job: str) -> None:
    for step in live.fold(job).steps:
        assert step.metrics is not None
        assert step.metrics.sampling_kl < 1e-6
