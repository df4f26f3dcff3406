"""A job whose answers have several turns ends with all of them after faults."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conversing import (
    AGENT,
    AGENT_CHANGES,
    STEPS,
    TURNS,
    assert_complete,
    assert_learned_from_the_agent,
    assert_learned_what_was_sampled,
    conversations_of,
)
from tests.e2e.live import Live, kill, wait_until

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_nothing_is_lost_with_environments_ranks_and_workers(live: Live, game: Path) -> None:
    """Each is killed once, while answers wait for their environments."""
    live.await_workers(2)
    job = live.submit(game)
    live.await_phase(job, "rollout", 0)
    wait_until(lambda: bool(conversations_of(live)), "conversations")
    for process in conversations_of(live)[-3:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    live.await_phase(job, "rollout", 1)
    kill(live.workers()["w0"].rank_pids[0])
    live.await_phase(job, "rollout", 2)
    kill(live.workers()["w1"].pid)
    assert_complete(live, job)
    assert_learned_what_was_sampled(live, job)
    shown = live.tlt("samples", job).stdout
    assert "[user] " in shown
    assert f"{TURNS} turns" in shown


def test_nothing_is_lost_with_agents_and_the_endpoint(live: Live) -> None:
    """An agent is killed, and a worker, whose process serves the endpoint."""
    live.await_workers(2)
    job = live.submit(AGENT, *AGENT_CHANGES)
    live.await_phase(job, "rollout", 0)
    wait_until(lambda: bool(conversations_of(live)), "agents")
    with contextlib.suppress(ProcessLookupError):
        kill(conversations_of(live)[-1])
    live.await_phase(job, "rollout", 1)
    kill(live.workers()["w1"].pid)
    assert_complete(live, job)
    assert_learned_from_the_agent(live, job)
    shown = [live.tlt("samples", job, "--step", str(step)).stdout for step in range(STEPS)]
    assert any("(conversation 2)" in each for each in shown)
