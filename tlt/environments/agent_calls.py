"""Run an agent in a process of its own: a function of the user's, or a program."""

import asyncio
import inspect
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tlt.environments.environment_messages import Observation, RunAgent
from tlt.environments.loopback_forwarder import LoopbackForwarder
from tlt.environments.own_folder import empty_folder
from tlt.environments.reward_value import reward_of
from tlt.isolation.error_text import describe
from tlt.isolation.fork_server import Reply

_REWARD_FILE = "TLT_REWARD"
_run = msgspec.json.Decoder(RunAgent)
Agent = Callable[[dict[str, Any], int], Any]


class AgentCalls:
    """Runs the agent once for each request; what it raises is an observation."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._folder: str | None = None
        self._forwarder: LoopbackForwarder | None = None

    def answer(self, body: bytes) -> Reply:
        request = _run.decode(body)
        try:
            if self._folder is None:
                self._folder = os.getcwd()
                self._forwarder = LoopbackForwarder(request.socket)
                for name in ("NO_PROXY", "no_proxy"):
                    os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1".lstrip(",")
            assert self._forwarder is not None
            empty_folder(self._folder)
            os.environ |= {
                "OPENAI_BASE_URL": f"http://127.0.0.1:{self._forwarder.port}/v1",
                "OPENAI_API_KEY": request.token,
            }
            found = self._agent(request.row, request.seed)
            if inspect.isawaitable(found):
                found = asyncio.run(_wait(found))
            observation = reward_of(found) if request.counts else Observation()
        except SystemExit as end:
            observation = Observation(error=f"the agent ended with {end.code}")
        except Exception as error:  # raised by the user's code
            observation = Observation(error=describe(error, "environment"))
        return Reply(observation)


async def _wait(found: Any) -> Any:
    return await found


def run_command(command: tuple[str, ...]) -> Agent:
    """Return an agent that runs a program; what it writes to $TLT_REWARD is its reward."""

    def run(row: dict[str, Any], seed: int) -> float | None:
        with tempfile.NamedTemporaryFile(prefix="reward-") as file:
            ended = subprocess.run(
                command,
                input=msgspec.json.encode(row) + b"\n",
                env={**os.environ, _REWARD_FILE: file.name, "TLT_SEED": str(seed)},
                check=False,
            )
            if ended.returncode:
                raise RuntimeError(f"{command[0]} ended with {ended.returncode}")
            said = Path(file.name).read_text().strip()
            return float(said) if said else None

    return run
