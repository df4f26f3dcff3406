"""A job on SGLang succeeds even if a part dies or hangs, on one device or on several."""

import contextlib
import signal
from pathlib import Path

import pytest

from tests.e2e.conversing import (
    AGENT,
    AGENT_CHANGES,
    assert_complete,
    assert_learned_from_the_agent,
    assert_learned_what_was_sampled,
    environments_of,
)
from tests.e2e.live import Live, count_dropped, counted_rollouts, kill, wait_until
from tests.session import write_policy
from tlt.blobs.answer_files import AnswerFiles
from tlt.protocol.events import DrafterDeltaReady, RolloutFinished
from tlt.runs.run_folder_reader import open_ledger

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def await_decoding(live: Live, job: str, step: int, schedulers: int = 1) -> int:
    """Wait until the schedulers decode and return the process id of the last one."""
    live.await_phase(job, "rollout", step)
    found: list[int] = []
    seen: dict[str, None] = {}

    def decoding() -> bool:
        worker = live.workers()["w0"]
        own = {pid: line for rank in worker.rank_pids for pid, line in children(rank)}
        seen[f"{worker.running} answers, with children {own}"] = None
        if worker.running > 0:
            found[:] = sorted(pid for pid, line in own.items() if "sglang" in line)
        return len(found) == schedulers

    try:
        wait_until(decoding, "SGLang to decode")
    except AssertionError as error:
        error.add_note("\n".join(seen))
        raise
    return found[-1]


def children(parent: int) -> list[tuple[int, str]]:
    """Return the process ids of a process's children with their command lines.

    Reads all of /proc: a thread's own list of children may be incomplete, see proc(5).
    """
    found: list[tuple[int, str]] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process may end meanwhile
            _, _, rest = (folder / "stat").read_text().rpartition(")")
            if int(rest.split()[1]) == parent:
                line = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                found.append((int(folder.name), line.strip()))
    return found


def test_survives_a_dead_and_a_hung_scheduler(alone: Live, sglang_spec: Path) -> None:
    job = alone.submit(sglang_spec, "workers.stuck_seconds=15")
    kill(await_decoding(alone, job, step=0))
    hung = await_decoding(alone, job, step=1)
    kill(hung, signal.SIGSTOP)
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    journal = alone.journal(job)
    counted = counted_rollouts(journal, open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4
    assert count_dropped(journal) == 0
    assert alone.fold(job).losses == 2
    logs = alone.tlt("logs", job).stdout
    assert "SGLang's scheduler was ended by SIGKILL" in logs
    assert "SGLang stood still for 15 s" in logs


def test_survives_a_rank_that_dies_in_an_update(alone: Live, sglang_spec: Path) -> None:
    before = set(Path("/dev/shm").glob("sglang_*"))
    job = alone.submit(sglang_spec, "algorithm.microbatch_tokens=1", "algorithm.checkpoint_every=1")
    alone.await_phase(job, "policy_update", step=1)
    kill(alone.workers()["w0"].rank_pids[0])
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    counted = counted_rollouts(alone.journal(job), open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4
    assert alone.fold(job).losses == 1
    # the killed rank could not tidy up
    assert [path for path in Path("/dev/shm").glob("sglang_*") if path not in before] == []


def test_survives_the_death_of_its_worker(alone: Live, sglang_spec: Path) -> None:
    alone.await_workers(1)
    job = alone.submit(sglang_spec)
    alone.await_phase(job, "rollout", step=1)
    worker = alone.workers()["w0"].pid
    kill(worker)
    wait_until(lambda: alone.workers()["w0"].pid != worker, "Ray to start w0 again")
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    counted = counted_rollouts(alone.journal(job), open_ledger(alone.runs / job))
    assert len(counted) == len(set(counted)) == 3 * 2 * 4


def test_memory_for_8_answers_decodes_32_and_loses_none(alone: Live, sglang_spec: Path) -> None:
    context, ahead = 220, 2 * (12 + 1)
    changes = (
        f"policy.max_context={context}",
        f"rollout.cache_tokens={8 * (context + ahead)}",
        *("rollout.slots=32", "rollout.max_new_tokens=200"),
        *("algorithm.prompts_per_step=8", "algorithm.steps=2"),
    )
    job = alone.submit(sglang_spec, *changes)
    assert alone.await_end(job)["status"] == "done", alone.job(job)["error"]
    journal = alone.journal(job)
    ledger = open_ledger(alone.runs / job)
    counted = counted_rollouts(journal, ledger)
    assert len(counted) == len(set(counted)) == 2 * 8 * 4
    assert count_dropped(journal) == 0
    snapshot = ledger.snapshot()
    events = [entry.event for entry in journal]
    retracted = sum(e.retractions for e in events if isinstance(e, RolloutFinished))
    assert sum(step.retractions for step in snapshot.steps) == retracted > 0
    for step in snapshot.steps:
        assert step.metrics is not None
        # the learner finds the log-probs that SGLang reported
        assert abs(step.metrics.sampling_kl) < 1e-6
    files = AnswerFiles(alone.runs / job)
    for event in (e for e in events if isinstance(e, RolloutFinished)):
        spans = files.read(event.answer).policies
        assert [(span.version, span.tokens) for span in spans] == [(event.step, event.length)]


def test_two_ranks_decode_and_learn_with_a_part_of_each_weight(
    pair: Live, sglang_spec: Path, tmp_path: Path
) -> None:
    policy = write_policy(tmp_path / "policy", layers=2, kv_heads=2)
    changes = (f"policy.path={policy}", "rollout.tensor_parallel=2", "algorithm.shards=all")
    job = pair.submit(sglang_spec, *changes, "algorithm.steps=2")
    kill(await_decoding(pair, job, step=1, schedulers=2))
    assert pair.await_end(job)["status"] == "done", pair.job(job)["error"]
    journal = pair.journal(job)
    counted = counted_rollouts(journal, open_ledger(pair.runs / job))
    assert len(counted) == len(set(counted)) == 2 * 2 * 4
    assert count_dropped(journal) == 0
    assert pair.fold(job).losses == 1
    # the rank without an engine trains no drafter, and is waited for by no one
    events = [entry.event for entry in journal]
    members = {event.delta.member for event in events if isinstance(event, DrafterDeltaReady)}
    assert members
    assert all(member.endswith(".0") for member in members)


def test_sglang_holds_conversations(alone: Live, game: Path) -> None:
    job = alone.submit(game, "rollout.engine=sglang", "speculation.mode=off")
    assert_complete(alone, job)
    assert_learned_what_was_sampled(alone, job)
    assert not environments_of(alone)


def test_sglang_trains_an_agent(alone: Live) -> None:
    job = alone.submit(AGENT, *AGENT_CHANGES, "rollout.engine=sglang", "speculation.mode=off")
    assert_complete(alone, job)
    assert_learned_from_the_agent(alone, job)
