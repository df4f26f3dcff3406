"""Fixtures of job specs: a short one, one with long answers and one with long updates."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import write_spec
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
