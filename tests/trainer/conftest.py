from pathlib import Path

import pytest
import torch

from tests.trainer.models import save_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def fresh_dir(tmp_path: Path) -> str:
    return save_llama(tmp_path / "fresh", seed=1)
