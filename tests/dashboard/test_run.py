"""A run's folder by requests: figures for Prometheus, samples, what is missing."""

import asyncio
import contextlib
from pathlib import Path

import httpx
import msgspec
import pytest

from cli.following import fold
from examples.tiny_reasoner.vocabulary import write_tokenizer
from tests.dashboard.conftest import Serve
from tests.dashboard.runs import some_run, write_journal, write_run
from tests.simulation.world import JOB
from tlt.dashboard.sources import FolderSource
from tlt.dashboard.tokens import Tokens
from tlt.errors import ConfigError
from tlt.messages import OriginSpan, RolloutFinished, Tensor
from tlt.store.journal import FILE_NAME, read


async def test_prometheus_reads_what_the_ledger_says(
    folder_client: httpx.AsyncClient, run_folder: Path
) -> None:
    told = (await folder_client.get("/metrics")).text
    snapshot = fold(run_folder)
    assert f'tlt_step{{job="{JOB}"}} {float(snapshot.step)}' in told
    assert f'tlt_policy_version{{job="{JOB}"}} {float(snapshot.version)}' in told
    learned = sum(duties.get("learn", 0.0) for duties in snapshot.workers.values())
    assert f'tlt_duty_seconds{{job="{JOB}",duty="learn"}} {learned!r}' in told


async def test_samples_are_found_again_in_the_journal(
    folder_client: httpx.AsyncClient, run_folder: Path
) -> None:
    events = [entry.event for entry in read(run_folder / FILE_NAME)]
    answers = [event for event in events if isinstance(event, RolloutFinished)]
    listed = (await folder_client.get(f"/api/jobs/{JOB}/samples?step=0&purpose=train")).json()
    assert listed["chosen"] == [0, "train"]
    group = listed["groups"][0]
    path = f"/api/jobs/{JOB}/samples/0/train/{group['prompt']}"
    sample = (await folder_client.get(path)).json()
    members = {
        answer.member
        for answer in answers
        if (answer.step, answer.purpose, answer.prompt) == (0, "train", group["prompt"])
    }
    assert {answer["member"] for answer in sample["answers"]} == members
    unknown = await folder_client.get(f"/api/jobs/{JOB}/samples/99/train/0")
    assert unknown.status_code == 404


async def test_a_run_that_crashed_opens_and_says_so(serve: Serve, tmp_path: Path) -> None:
    world = some_run(3)
    client = await serve(FolderSource(write_run(world, tmp_path, len(world.journal) // 2)))
    assert "tlt_step{" in (await client.get("/metrics")).text


def test_no_run_no_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        FolderSource(tmp_path)


def test_pieces_are_the_text(run_folder: Path, tmp_path: Path) -> None:
    """Whatever the tokens' origins, side by side they are what was written."""
    write_tokenizer(tmp_path)
    some = next(
        e.event for e in read(run_folder / FILE_NAME) if isinstance(e.event, RolloutFinished)
    )
    ids = [5, 6, 7, 8, 9, 10, 3, 4]
    spans = [("accepted", 3), ("corrected", 1), ("plain", 2), ("accepted", 2)]
    answer = msgspec.structs.replace(
        some,
        tokens=Tensor(
            dtype="int32", shape=(8,), data=b"".join(i.to_bytes(4, "little") for i in ids)
        ),
        origins=tuple(OriginSpan(origin=origin, tokens=count) for origin, count in spans),
    )
    pieces = Tokens(tmp_path).pieces(answer)
    assert [origin for origin, _ in pieces] == [origin for origin, _ in spans]
    whole = Tokens(tmp_path).pieces(
        msgspec.structs.replace(answer, origins=(OriginSpan(origin="plain", tokens=8),))
    )
    assert "".join(text for _, text in pieces) == whole[0][1]
    nowhere = Tokens(tmp_path / "nowhere").pieces(answer)
    assert nowhere == (("", answer.text),)


async def test_a_browser_that_never_reads_keeps_nobody_waiting(
    serve: Serve, tmp_path: Path
) -> None:
    world = some_run(3)
    folder = write_run(world, tmp_path, 10)
    client = await serve(FolderSource(folder))
    port = client.base_url.port
    path = f"/api/events?job={JOB}"
    _, sleeper = await asyncio.open_connection("127.0.0.1", port)
    sleeper.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    await sleeper.drain()
    async with client.stream("GET", path, timeout=20) as answer:
        async for line in answer.aiter_lines():
            if f'"entries":{len(world.journal)}' in line:
                break
            if '"entries":10' in line:
                write_journal(world, folder)
    sleeper.close()
    with contextlib.suppress(ConnectionError):
        await sleeper.wait_closed()
