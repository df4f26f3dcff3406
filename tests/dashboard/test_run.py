"""The dashboard of a run's folder serves metrics and samples, and reports damaged data."""

import asyncio
import contextlib
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from docs import recording
from examples.tiny_reasoner.vocabulary import write_tokenizer
from tests.dashboard.conftest import Serve
from tests.dashboard.runs import some_run, write_journal, write_run
from tests.samples import written_answer
from tests.simulation.world import JOB
from tlt.base.id_types import DrafterVersion, Step
from tlt.dashboard import page_sections
from tlt.dashboard.answer_pieces import PieceDecoder, Pieces
from tlt.dashboard.answer_samples import Samples
from tlt.dashboard.data_sources import FolderSource
from tlt.dashboard.prometheus import exposition
from tlt.dashboard.rollout_tail import RunningAnswers, completion_curve
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.run_fold import Run
from tlt.errors import ConfigError, JournalError
from tlt.policies.run.run_state import Phase
from tlt.protocol.events import RolloutFinished
from tlt.protocol.refs import SCHEMA_VERSION, OriginSpan
from tlt.report import Positions
from tlt.runs.run_folder_reader import read_snapshot, read_spec
from tlt.store.journal import FILE_NAME, read

_DAMAGED = b'{"schema": %d}\n' % SCHEMA_VERSION


async def test_metrics_are_those_of_the_ledger(
    folder_client: httpx.AsyncClient, run_folder: Path
) -> None:
    metrics = (await folder_client.get("/metrics")).text
    snapshot = read_snapshot(run_folder)
    assert f'tlt_step{{job="{JOB}"}} {float(snapshot.step)}' in metrics
    assert f'tlt_policy_version{{job="{JOB}"}} {float(snapshot.version)}' in metrics
    learned = sum(duties.get("policy_update", 0.0) for duties in snapshot.workers.values())
    assert f'tlt_duty_seconds{{job="{JOB}",duty="policy_update"}} {learned!r}' in metrics


@pytest.mark.parametrize(("reward", "is_accuracy"), [(1.0, True), (0.5, False)])
def test_reports_an_accuracy_if_all_rewards_are_binary(
    tmp_path: Path, reward: float, is_accuracy: bool
) -> None:
    world = next(run for run in map(some_run, range(20)) if run.spec.algorithm.eval_every)
    entries = [msgspec.json.decode(line) for line in world.journal]
    scores = [e["event"] for e in entries if e["event"]["type"] == "RolloutScored"]
    for event in scores:
        event["reward"] = reward
    folder = write_run(world, tmp_path)
    lines = [msgspec.json.encode(entry) + b"\n" for entry in entries]
    (folder / FILE_NAME).write_bytes(b"".join(lines))
    feed = RunFeed(Run(folder, read_spec(folder)))
    read_up(feed.run)
    assert {event["purpose"] for event in scores} == {"train", "eval"}
    metrics = exposition(None, [feed])
    assert f'tlt_held_out_reward{{job="{JOB}"}} {reward}' in metrics
    assert (f'tlt_accuracy{{job="{JOB}"}} {reward}' in metrics) == is_accuracy


async def test_finds_samples_in_the_journal(
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
    many = "9" * 5000
    for other in ("99/train/0", f"0/train/{many}", f"{many}/train/0", "0/train/x", "0/nothing/0"):
        unknown = await folder_client.get(f"/api/jobs/{JOB}/samples/{other}")
        assert unknown.status_code == 404
    odd = await folder_client.get(f"/api/jobs/{JOB}/samples?step={many}&purpose=train")
    assert odd.status_code == 404


async def test_shows_a_group_without_its_prompt_if_the_data_has_changed(
    folder_client: httpx.AsyncClient, run_folder: Path
) -> None:
    (run_folder / "data").mkdir()
    listed = (await folder_client.get(f"/api/jobs/{JOB}/samples")).json()
    group = listed["groups"][0]
    path = f"/api/jobs/{JOB}/samples/{group['step']}/{group['purpose']}/{group['prompt']}"
    for content in (b"", b'{"odd": 1}\n' * 100, b"\xff\n" * 100):
        (run_folder / "data" / f"{group['purpose']}.jsonl").write_bytes(content)
        sample = await folder_client.get(path)
        assert (sample.status_code, sample.json()["question"]) == (200, "")


async def test_opens_a_run_that_crashed(serve: Serve, tmp_path: Path) -> None:
    world = some_run(3)
    client = await serve(FolderSource(write_run(world, tmp_path, len(world.journal) // 2)))
    assert "tlt_step{" in (await client.get("/metrics")).text


async def test_single_request_reads_again_after_entries_were_removed(
    serve: Serve, tmp_path: Path
) -> None:
    world = some_run(3)
    folder = write_run(world, tmp_path)
    client = await serve(FolderSource(folder))
    assert (await client.get("/metrics")).status_code == 200
    write_journal(world, folder, 20)
    for path in ("/metrics", f"/api/jobs/{JOB}/samples", "/metrics"):
        assert (await client.get(path)).status_code == 200
    assert "tlt_step{" in (await client.get("/metrics")).text


async def test_damaged_journal_leaves_spec_and_session_metrics(
    serve: Serve, tmp_path: Path
) -> None:
    folder = write_run(some_run(3), tmp_path, 10)
    (folder / FILE_NAME).write_bytes(_DAMAGED)
    client = await serve(FolderSource(folder))
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.get(f"/api/jobs/{JOB}/spec")).status_code == 200
    refused = await client.get(f"/api/jobs/{JOB}/samples")
    assert (refused.status_code, "cannot be read" in refused.json()["error"]) == (500, True)


def test_catch_up_reads_a_shortened_journal_again_once(tmp_path: Path) -> None:
    world = some_run(3)
    folder = write_run(world, tmp_path, 40)
    run = Run(folder, read_spec(folder))
    read_up(run)
    write_journal(world, folder, 30)
    read_up(run)
    assert run.position.entries == 30
    write_journal(world, folder, 35)
    with open(folder / FILE_NAME, "ab") as file:
        file.write(_DAMAGED)
    with pytest.raises(JournalError):
        read_up(run)


def test_time_of_a_crashed_run_ends_with_its_last_entry(tmp_path: Path) -> None:
    run = crashed(tmp_path, time.time() - 1200)
    head = page_sections.head(run, followed=False)
    assert (head.status, head.tokens_per_second) == (page_sections.NO_END, None)
    assert page_sections.now(run, followed=False) == pytest.approx(head.seconds, abs=0.01)
    state = run.ledger.state
    assert run.tail.view(state, run.last_entry, None).forecast is None


def test_silent_run_is_live_while_its_session_is_up(tmp_path: Path) -> None:
    run = crashed(tmp_path, time.time() - 1200)
    head = page_sections.head(run, followed=True)
    assert head.status == "running"
    assert head.tokens_per_second == 0.0  # the last tokens came long ago
    assert page_sections.now(run, followed=True) == pytest.approx(head.seconds + 1200, abs=60)


def test_run_with_a_recent_entry_is_live_without_a_session(tmp_path: Path) -> None:
    assert (
        page_sections.head(crashed(tmp_path, time.time() - 5), followed=False).status == "running"
    )


def test_no_forecast_for_a_job_that_ended_within_a_rollout_batch(tmp_path: Path) -> None:
    run = crashed(tmp_path, 1000.0)
    state = msgspec.structs.replace(run.ledger.state, phase=Phase.ENDED)
    tail = run.tail.view(state, run.last_entry, RunningAnswers(running=3))
    assert (tail.forecast, tail.seconds, tail.queued, tail.running) == (None, 0.0, 0, 0)


def test_keeps_the_row_of_ngrams_beside_many_drafters() -> None:
    rows = [
        Positions(drafter=d, steps=1, shares=()) for d in (None, *map(DrafterVersion, range(20)))
    ]
    listed = [row.drafter for row in page_sections.newest_drafters(rows)]
    assert listed == [None, *range(8, 20)]


def test_completion_curve_ends_with_the_last_answer() -> None:
    curve = completion_curve([float(n) for n in range(1, 1000)], Step(0), "train", 1000)
    assert (curve.done[-1], curve.answers) == (999.0, 999)
    assert len(curve.done) == -(-999 // curve.stride)


def test_tail_that_is_viewed_often_equals_one_that_is_viewed_once(tmp_path: Path) -> None:
    world = some_run(3)
    folder = write_run(world, tmp_path, 1)
    often, once = Run(folder, read_spec(folder)), Run(folder, read_spec(folder))
    for lines in range(1, len(world.journal), 7):
        write_journal(world, folder, lines)
        read_up(often)
        often.tail.view(often.ledger.state, often.last_entry, None)
    read_up(once)
    frequent, final = (
        each.tail.view(each.ledger.state, each.last_entry, None) for each in (often, once)
    )
    assert frequent == final
    assert sum(frequent.lengths.counts) == len(once.ledger.batch.lengths) > 0


def crashed(folder: Path, at: float) -> Run:
    """Return a run that stopped within a rollout batch, with its last entry at `at`."""
    world = some_run(3)
    entries = [msgspec.json.decode(line) for line in world.journal]
    ends = next(n for n, e in enumerate(entries) if e["event"]["type"] == "RolloutFinished") + 1
    late = at - entries[ends - 1]["at"]
    for entry in entries:
        entry["at"] += late
    folder = write_run(world, folder)
    lines = [msgspec.json.encode(entry) + b"\n" for entry in entries[:ends]]
    (folder / FILE_NAME).write_bytes(b"".join(lines))
    run = Run(folder, read_spec(folder))
    read_up(run)
    return run


def read_up(run: Run) -> None:
    while run.catch_up(1.0):
        pass


def test_refuses_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        FolderSource(tmp_path)


def test_pieces_of_any_origins_join_to_the_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ids = [5, 6, 7, 8, 9, 10, 3, 4]
    spans = [("accepted", 3), ("corrected", 1), ("plain", 2), ("accepted", 2)]
    answer = written_answer(
        ids, origins=tuple(OriginSpan(origin=origin, tokens=count) for origin, count in spans)
    )
    pieces = PieceDecoder(tmp_path).pieces(answer)
    assert [origin for origin, _ in pieces] == [origin for origin, _ in spans]
    whole = PieceDecoder(tmp_path).pieces(
        written_answer(ids, origins=(OriginSpan(origin="plain", tokens=8),))
    )
    assert "".join(text for _, text in pieces) == whole[0][1]
    nowhere = PieceDecoder(tmp_path / "nowhere").pieces(answer)
    assert nowhere == (("", answer.text),)


def test_character_belongs_to_the_piece_that_completes_it(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["a text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Antwort: 你好 → √2 😀 ok"
    ids = tokenizer.encode(text).ids
    half = tokenizer.encode("ab😀").ids[:-1]
    for size in (1, 2, 3, 7):
        assert "".join(piece for _, piece in pieces_of(tmp_path, ids, size)) == text
        assert "".join(piece for _, piece in pieces_of(tmp_path, half, size)) == "ab\ufffd"
    alone = pieces_of(tmp_path, tokenizer.encode("a好b").ids, 1)
    assert [piece for _, piece in alone] == ["a", "", "", "好", "b"]


def pieces_of(policy: Path, ids: list[int], size: int) -> Pieces:
    """Return the pieces of an answer whose spans have `size` tokens each."""
    spans = tuple(
        OriginSpan(
            origin=("accepted", "corrected")[begin // size % 2], tokens=min(size, len(ids) - begin)
        )
        for begin in range(0, len(ids), size)
    )
    return PieceDecoder(policy).pieces(written_answer(ids, origins=spans))


async def test_client_that_never_reads_does_not_delay_others(serve: Serve, tmp_path: Path) -> None:
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


def test_shows_the_texts_that_are_in_the_run_folder(tmp_path: Path) -> None:
    """The recording has the texts of two steps; of the others, length and reward are known."""
    folder = recording.unpack(tmp_path / "run")
    samples = Samples(folder, read_spec(folder))
    events = [entry.event for entry in read(folder / FILE_NAME)]
    for event in events:
        samples.add(event)
    answers = [e for e in events if isinstance(e, RolloutFinished) and e.purpose == "train"]
    for known in (True, False):
        some = next(event for event in answers if bool(event.answer.file) == known)
        key = some.step, some.purpose, some.prompt
        group = samples.group(key)
        assert group is not None
        for shown in samples.sample(key, group).answers:
            if known:
                assert sum(shown.origins.values()) == shown.tokens > 0
                assert "".join(text for _, text in shown.pieces)
            else:
                assert shown.pieces == (("", "(the text is no longer in the run's folder)"),)
