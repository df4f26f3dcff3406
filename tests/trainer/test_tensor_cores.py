"""Training in float32 uses a GPU's tensor cores, and nothing else does."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from tests.labelled_device import CUDA, labelled_device
from tests.trainer import drafters
from tests.trainer.models import CPU, samples, spec, whole
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.micro_batches import Window, build_batch
from tlt.trainer.drafter.samples import EmbeddingAndHead
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.speed import precision_choice

DEVICES = [(CPU, "highest"), (CUDA, "high")]


def on(device: torch.device) -> AbstractContextManager[object]:
    return labelled_device() if device == CUDA else nullcontext()


@pytest.mark.parametrize(("device", "expected"), DEVICES)
def test_the_policys_update_uses_them(model_dir: str, device: torch.device, expected: str) -> None:
    found: list[str] = []
    with on(device):
        learner = PolicyLearner(model_dir, spec(attention="padded"), None, device)
        learner.update(
            0, [whole(samples(3))], None, lambda: found.append(torch.get_float32_matmul_precision())
        )
    assert set(found) == {expected}
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(("device", "expected"), DEVICES)
def test_drafter_training_uses_them(device: torch.device, expected: str) -> None:
    found: list[str] = []
    with on(device):
        drafter = drafters.drafter("eagle", torch.float32).to(device)
        ends = drafters.ends(torch.float32)
        ends = EmbeddingAndHead(embedding=ends.embedding.to(device), head=ends.head.to(device))
        sizes = torch.ones(drafter.fc.in_features, device=device)
        learner = DrafterLearner(drafter, ends, DrafterHyperparameters(), sizes)
        chosen = drafters.samples("eagle", 2, dtype=torch.float32)
        windows = [Window(sample=i, first=0, last=s.rows) for i, s in enumerate(chosen)]
        learner.learn(
            build_batch(chosen, windows, 3, device),
            lambda: found.append(torch.get_float32_matmul_precision()),
        )
    assert set(found) == {expected}
    assert torch.get_float32_matmul_precision() == "highest"


def test_precisions_are_compared_with_them(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    def is_better(*_: object) -> bool:
        found.append(torch.get_float32_matmul_precision())
        return True

    monkeypatch.setattr(precision_choice, "_is_better", is_better)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with labelled_device():
        model = load_model(model_dir, CUDA)
        assert precision_choice.choose_bfloat16(model, spec(precision="auto"), None)
    assert found == ["high"]
