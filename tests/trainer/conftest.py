from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.models import save_llama
from tests.trainer.second_rank import Peer
from tlt.trainer import process_group as groups

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def fresh_dir(tmp_path: Path) -> str:
    return save_llama(tmp_path / "fresh", seed=1)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Yield a process that joins one group after another, as a rank does."""
    other = Peer()
    yield other
    other.close()


@pytest.fixture
def rendezvous() -> Iterator[str]:
    store, port = groups.serve_rendezvous("127.0.0.1")
    yield f"127.0.0.1:{port}"
    groups.leave_group()
    del store
