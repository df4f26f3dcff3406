"""Fixtures of a policy, of a drafter fitted to it, and of folders for engines."""

from pathlib import Path

import pytest

from tests.engine import drafter_models
from tests.sglang.speculating import Memoryless, make_memoryless
from tlt.models.eagle_drafter import Drafter


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafter_models.predictable_policy(tmp_path_factory.mktemp("policy") / "policy")


@pytest.fixture(scope="session")
def fitted(policy: Path) -> Drafter:
    return drafter_models.fitted_drafter("eagle", policy)


@pytest.fixture(scope="session")
def memoryless(tmp_path_factory: pytest.TempPathFactory) -> Memoryless:
    return make_memoryless(tmp_path_factory.mktemp("memoryless"), likeliest=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the module's engine."""
    return tmp_path_factory.mktemp("sglang")
