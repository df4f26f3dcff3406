"""Run tasks of a verifiers environment with the interpreter that has it; this one imports no TLT.

`tasks` writes a range of the taskset's tasks, a line of JSON each. `serve` runs tasks that come
over a Unix socket, many at a time: a line asks for an episode, and a line tells how it ended. Who
closes the connection gives the episode up. Settings come from standard input.
"""

import asyncio
import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator
from itertools import islice
from statistics import fmean
from typing import IO, Any

_MOST_BYTES = 1 << 30
# all answers of a worker may begin at once
_MOST_CONNECTING = 4096
# a larger one is no measure
_LARGEST = 1e100
# that an episode reports
_MOST_MEASURES = 64
# verifiers reads the key of its endpoint from a variable, and keeps names like this to itself
_KEY = "TLT_API_KEY"


def main() -> None:
    # what a taskset prints belongs to the log
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.load(sys.stdin)
    try:
        from verifiers.v1.utils.loaders import resolve_env_config  # pyright: ignore[reportMissingImports]

        config = resolve_env_config(settings["env"])
        if sys.argv[1] == "tasks":
            for task in _tasks(config.taskset, settings):
                print(json.dumps(task), file=out)
        else:
            asyncio.run(_serve(config, settings, out))
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": _why(error)}), file=out)


def _why(error: Exception) -> str:
    """Return in a line why the taskset can't be loaded, with the key of a wrong configuration."""
    if isinstance(error, ModuleNotFoundError) and error.name == "verifiers":
        return f"{sys.executable} has no verifiers: install it there, or set environment.python"
    errors: Any = getattr(error, "errors", None)  # of pydantic's
    if errors is not None:
        wrong = ((".".join(map(str, each["loc"])), each["msg"]) for each in errors())
        return "; ".join(f"{key}: {message}" for key, message in wrong)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _tasks(config: Any, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from verifiers.v1.utils.loaders import load_taskset  # pyright: ignore[reportMissingImports]

    taskset = load_taskset(config)
    if settings["stop"] is None and not taskset.bounded:
        raise ValueError("it has no end: name one, as in taskset:0:1000")
    for task in islice(taskset, settings["start"], settings["stop"]):
        data = task.data.model_dump(mode="json")
        shown = task.data.prompt_text or task.data.description or task.data.name
        yield {
            "prompt": shown or f"task {task.data.idx}",
            "answer": data.get("answer"),
            "task": data,
        }


async def _serve(config: Any, settings: dict[str, Any], out: IO[str]) -> None:
    from verifiers.v1.utils.loaders import load_environment  # pyright: ignore[reportMissingImports]

    environment = load_environment(config)
    async with environment.serving():
        os.environ[_KEY] = settings["key"]
        episodes = _Episodes(environment, settings["base_url"])
        path, queue = settings["socket"], _MOST_CONNECTING
        server = await asyncio.start_unix_server(
            episodes.answer, path, limit=_MOST_BYTES, backlog=queue
        )
        print(json.dumps({}), file=out, flush=True)
        await server.serve_forever()


class _Episodes:
    def __init__(self, environment: Any, base_url: str) -> None:
        from verifiers.v1.configs.client import EvalClientConfig  # pyright: ignore[reportMissingImports]

        self._environment = environment
        self._task_type = type(environment.taskset).task_type()
        # one for all: verifiers keeps a client for each of them until it ends
        self._client = EvalClientConfig(base_url=base_url, api_key_var=_KEY)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        running = asyncio.ensure_future(self._run(request))
        given_up = asyncio.ensure_future(reader.read())
        await asyncio.wait({running, given_up}, return_when=asyncio.FIRST_COMPLETED)
        given_up.cancel()
        if not running.done():
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            writer.write(json.dumps(await running).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]

        try:
            data = self._task_type.data_type().model_validate(request["task"])
            task = self._task_type(data, self._environment.config.taskset.task)
            (slot,) = self._environment.slots(task)
            context = ModelContext(model=request["model"], client=self._client)
            return _outcome(await self._environment.run_slot(slot, context), self._client)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}


def _outcome(episode: Any, client: Any) -> dict[str, Any]:
    """Return the reward of an episode, and what it measured; of several agents, their means."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [episode.last_error, *(trace.last_error for trace in traces)]
    if not episode.ok or not traces:
        said = next((error for error in errors if error is not None), None)
        if said is None:
            return {"error": "the episode has no trace of an agent that is trained"}
        print(said.traceback or said.message, file=sys.stderr)
        return {"error": f"{said.type}: {said.message}"}
    for agent in (trace.agent for trace in episode.traces):
        # its turns would be learned with the policy's reward
        if not agent.trainable and agent.config.client == client:
            advice = f"give it a client of its own, env.{agent.name}.client"
            return {"error": f"agent {agent.name} isn't trainable: {advice}"}
    measured = dict[str, list[float]]()
    for trace in traces:
        scores = {
            name: reward.score for name, reward in trace.rewards.items() if reward is not None
        }
        # a metric may have a reward's name
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None and abs(value) <= _LARGEST:
                measured.setdefault(name, []).append(value)
    reward = fmean(trace.reward for trace in traces)
    if not math.isfinite(reward):
        return {"error": f"the reward is {reward}"}
    reported = islice(measured.items(), _MOST_MEASURES)
    return {"reward": reward, "metrics": {name: fmean(values) for name, values in reported}}


if __name__ == "__main__":
    main()
