"""bfloat16 is chosen by the spec or by a measurement on the model."""

import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from tests.trainer.models import CPU, VOCABULARY, spec
from tlt.trainer.policy.model.logprobs import score_batch
from tlt.trainer.policy.model.micro_batches import pad
from tlt.trainer.policy.model.model_loading import load_model
from tlt.trainer.policy.speed import precision_choice
from tlt.trainer.policy.speed.layer_probe import LayerProbe, make_dummy_samples
from tlt.trainer.policy.speed.precision_choice import choose_bfloat16, gradient_cosine


@pytest.fixture(scope="module")
def model(model_dir: str) -> PreTrainedModel:
    return load_model(model_dir, CPU)


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)


def test_spec_decides_without_a_measurement(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(LayerProbe, "seconds", None)
    assert choose_bfloat16(model, spec(precision="bfloat16"), None)
    assert not choose_bfloat16(model, spec(precision="float32"), None)


def test_measures_nothing_without_bfloat16_units(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with capture_logs() as logs:
        assert not choose_bfloat16(model, spec(precision="auto"), None)
    assert logs == []


@pytest.mark.parametrize(
    ("seconds", "cosine", "taken"),
    [(0.5, 0.9995, True), (0.5, 0.994, False), (2.0, 1.0, False), (0.5, float("nan"), False)],
)
@pytest.mark.usefixtures("units")
def test_takes_bfloat16_if_faster_and_of_similar_gradient(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    cosine: float,
    taken: bool,
):
    monkeypatch.setattr(LayerProbe, "seconds", lambda _, bfloat16: seconds if bfloat16 else 1.0)
    monkeypatch.setattr(precision_choice, "gradient_cosine", lambda *_: cosine)
    with capture_logs() as logs:
        assert choose_bfloat16(model, spec(precision="auto"), 40) is taken
    assert [entry["precision"] for entry in logs] == ["bfloat16" if taken else "float32"]


@pytest.mark.usefixtures("units")
def test_tiny_reasoner_stays_in_float32(monkeypatch: pytest.MonkeyPatch):
    """The gradient on a real step has a cosine of 0.994, and the measurement agrees."""
    monkeypatch.setattr(LayerProbe, "seconds", lambda _, bfloat16: 0.5 if bfloat16 else 1.0)
    demo = load_model("examples/tiny_reasoner/model", CPU)
    with capture_logs() as logs:
        assert not choose_bfloat16(demo, spec(precision="auto"), None)
    assert 0.98 < logs[0]["cosine"] < 0.998


def test_gradient_cosine_compares_both_precisions(model: PreTrainedModel):
    batch = pad(make_dummy_samples([20, 12], VOCABULARY), CPU)
    flat: list[torch.Tensor] = []
    for bfloat16 in (False, True):
        logprobs, _ = score_batch(model, batch, bfloat16)
        parts = torch.autograd.grad((logprobs * batch.advantage).sum(), list(model.parameters()))
        flat.append(torch.cat([part.flatten() for part in parts]).double())
    expected = torch.cosine_similarity(flat[0], flat[1], dim=0).item()
    assert gradient_cosine(model, batch) == pytest.approx(expected, abs=1e-6)
    assert 0.9 < expected < 1.0


def test_gradient_cosine_keeps_one_gradient_and_no_more(model: PreTrainedModel):
    """A large policy's second gradient would take as much memory as its weights."""
    batch = pad(make_dummy_samples((20, 9), VOCABULARY), CPU)
    parameters = list(model.parameters())
    kept: list[int] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _: kept.append(sum(p.grad is not None for p in parameters))
        )
        for parameter in parameters
    ]
    gradient_cosine(model, batch)
    for handle in handles:
        handle.remove()
    assert kept == [1] * len(parameters)
    assert all(parameter.grad is None for parameter in parameters)
