"""Fixtures of job specs: a short one, and those with long answers, long updates and SGLang."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conversing import write_game
from tests.e2e.live import Live, write_spec
from tests.session import write_policy


@pytest.fixture(scope="session")
def spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    return write_spec(home, raw_spec)


@pytest.fixture(scope="session")
def long_spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    """Return a job whose rollouts take seconds, so that a fault can hit one."""
    longer = {
        **raw_spec,
        "name": "long",
        "rollout": {"max_new_tokens": 480, "slots": 4},
        "algorithm": {**raw_spec["algorithm"], "eval_every": 0, "minibatches": 4},
    }
    return write_spec(home, longer, "long.yaml")


@pytest.fixture(scope="session")
def slow_update_spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    """Return a job whose updates take seconds: a deep policy, one answer per micro-batch."""
    slow = {
        **raw_spec,
        "name": "slow-update",
        "policy": {"path": str(write_policy(home / "deep", layers=24))},
        "rollout": {"max_new_tokens": 100, "slots": 8},
        "algorithm": {**raw_spec["algorithm"], "eval_every": 0, "microbatch_tokens": 1},
    }
    return write_spec(home, slow, "slow-update.yaml")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start a session with one worker of one rank, which must repeat lost work itself.

    SGLang expects no answer to need 16 more tokens there, so that it may run out of memory.
    """
    session = Live(tmp_path_factory.mktemp("alone"))
    session.environment["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = "16"
    session.tlt("up", "--workers", "1", "--runs", str(session.runs))
    yield session
    session.tlt("down")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Start a session with one worker of two ranks."""
    session = Live(tmp_path_factory.mktemp("pair"))
    session.tlt("up", "--workers", "1", "--ranks", "2", "--runs", str(session.runs))
    yield session
    session.tlt("down")


@pytest.fixture(scope="module")
def sglang_spec(home: Path, raw_spec: dict[str, Any]) -> Path:
    spec = {
        **raw_spec,
        "name": "sglang",
        "rollout": {"engine": "sglang", "max_new_tokens": 480, "slots": 8},
        "speculation": {"mode": "adaptive"},
        "drafter": {"train": "always", "hot_tokens": 16},
        "algorithm": {
            **raw_spec["algorithm"],
            "steps": 3,
            "eval_every": 0,
            "prompts_per_step": 2,
            "group_size": 4,
        },
    }
    return write_spec(home, spec, "sglang.yaml")


@pytest.fixture(scope="session")
def game(home: Path, raw_spec: dict[str, Any]) -> Path:
    return write_game(home, raw_spec)
