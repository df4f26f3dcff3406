"""A taskset of verifiers with a harness of its own, as its users write them.

The program asks for two turns, and a task is worth the digits that it gets.
"""

import asyncio
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

PROGRAM = """
import json, sys, urllib.request

endpoint, key, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
for _ in range(2):
    request = urllib.request.Request(
        endpoint.rstrip("/").removesuffix("/v1") + "/v1/chat/completions",
        json.dumps({"model": model, "messages": messages}).encode(),
        {"authorization": f"Bearer {key}", "content-type": "application/json"},
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append({"role": "assistant", "content": said["content"]})
    messages.append({"role": "user", "content": "4+"})
"""


class DigitsData(vf.TaskData):
    answer: str
    mark: str | None = None


class DigitsTask(vf.Task[DigitsData]):
    async def setup(self, trace, runtime):
        if self.data.mark is None:
            return
        Path(self.data.mark).touch()
        try:
            while Path(self.data.mark).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            Path(f"{self.data.mark}-given-up").touch()
            raise

    @vf.reward(weight=0.5)
    async def digits(self, trace) -> float:
        if self.data.answer == "broken":
            raise RuntimeError("no world")
        said = "".join(message.content or "" for message in trace.assistant_messages)
        return float(sum(each.isdigit() for each in said))

    @vf.metric
    async def turns(self, trace) -> float:
        return float(len(trace.assistant_messages))


class DigitsConfig(vf.TasksetConfig):
    prompt: str = "12+"
    count: int = 8
    mark: str | None = None


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self):
        print("loading")
        for index in range(self.config.count):
            mark = self.config.mark if index == 0 else None
            answer = "broken" if index == 2 else str(index)
            yield DigitsTask(DigitsData(prompt=self.config.prompt, answer=answer, mark=mark))


class DigitsHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> ProgramResult:
        arguments = [endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program([sys.executable, "-c", PROGRAM, *arguments], {})


__all__ = ["DigitsHarness", "DigitsTaskset"]
