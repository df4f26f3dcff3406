"""The policy is updated on an accelerator as on a CPU."""

from pathlib import Path

import pytest
import torch

from tests.engine.reference import GREEDY, answers, new_request, show
from tests.host_syncs import HostSync
from tests.labelled_device import CUDA, LabelledDevice, labelled_device
from tests.trainer.models import CPU, never_interrupt, samples, spec, whole
from tests.trainer.test_flash_attention import attend_by_segment
from tlt.base.id_types import PolicyVersion
from tlt.engine.native import NativeEngine
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.safetensors_io import write_weights
from tlt.protocol.shared_values import UpdateMetrics
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model import packed_attention
from tlt.trainer.policy.model.micro_batches import build_micro_batches
from tlt.trainer.policy.policy_learner import PolicyLearner

PLAIN = spec(attention="padded")
PENALISED = spec(
    attention="padded", kl_coefficient=0.1, kl_in="reward", advantage="batch", minibatches=2
)
GROUPED = spec(attention="padded", kl_coefficient=0.1, kl_in="reward", minibatches=2)
ALL = spec(attention="padded", kl_coefficient=0.1, gradient_checkpointing=True, minibatches=2)
OFFLOADED = spec(attention="padded", gradient_checkpointing="offload", minibatches=2)
PACKED = spec(attention="flash", precision="bfloat16", kl_coefficient=0.1)


def updated(
    folder: str, chosen: AlgorithmSpec, device: torch.device
) -> tuple[PolicyLearner, list[UpdateMetrics]]:
    learner = PolicyLearner(folder, chosen, None, device)
    metrics: list[UpdateMetrics] = []
    for step in range(2):
        parts = [whole(samples(6, seed)) for seed in range(chosen.minibatches)]
        metrics.append(learner.update(step, parts, None, never_interrupt))
    return learner, metrics


@pytest.mark.parametrize("chosen", [PLAIN, ALL, OFFLOADED, PENALISED, GROUPED])
def test_updates_as_a_cpu_does(model_dir: str, chosen: AlgorithmSpec, tmp_path: Path) -> None:
    expected, metrics = updated(model_dir, chosen, CPU)
    state = expected.optimiser_state()
    with labelled_device():
        learner, found = updated(model_dir, chosen, CUDA)
        assert {weight.device for weight in learner.weights().values()} == {CUDA}
        for name, weight in learner.weights().items():
            torch.testing.assert_close(weight.cpu(), expected.weights()[name], rtol=1e-3, atol=1e-4)
        for one, other in zip(found, metrics, strict=True):
            assert one.loss == pytest.approx(other.loss, rel=1e-3, abs=1e-5)
            assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-3)
        write_weights(tmp_path / "weights", learner.weights())
        write_weights(tmp_path / "optimiser", learner.optimiser_state())
        learner.load_weights(expected.weights())
        learner.load_optimiser_state(state)
        assert torch.equal(learner.optimiser_state()["step"].cpu(), state["step"])
        learner.update(2, [whole(samples(4))], None, never_interrupt)


def syncs_of_update(
    learner: PolicyLearner, device: LabelledDevice, count: int
) -> tuple[list[HostSync], int]:
    """Return what an update waits for beside copying micro-batches, and how many there are."""
    chosen, packed = samples(count), learner._models.packed
    batches = build_micro_batches(chosen, PLAIN.chosen_microbatch_tokens, CPU, packed)
    device.syncs.clear()
    learner.update(1, [whole(chosen)], None, never_interrupt)
    # what is copied before anything is computed, and the stand-in for a GPU's attention
    others = ("tlt/trainer/policy/model/micro_batches.py", "tlt/kernels/", "tests/")
    found = [sync for sync in device.syncs if not sync.line.startswith(others)]
    return found, len(batches)


def test_a_micro_batch_of_padded_answers_waits_for_the_device_once(model_dir: str) -> None:
    """Transformers asks if a row holds several sequences; the rest is read at the update's end."""
    with labelled_device() as device:
        learner = PolicyLearner(model_dir, PLAIN, None, CUDA)
        learner.update(0, [whole(samples(4))], None, never_interrupt)
        for count in (4, 24):
            found, batches = syncs_of_update(learner, device, count)
            # the votes to compile, the gradient's norm and the metrics, each way
            assert len(found) == batches + 5, found


# a labelled device computes everything but attention in float32
@pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
def test_a_micro_batch_of_packed_answers_never_waits_for_the_device(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "flash_kernel", lambda: attend_by_segment)
    with labelled_device() as device:
        learner = PolicyLearner(model_dir, PACKED, None, CUDA)
        learner.update(0, [whole(samples(4))], None, never_interrupt)
        few, _ = syncs_of_update(learner, device, 4)
        many, batches = syncs_of_update(learner, device, 24)
        assert batches > 4
        assert len(few) == len(many) == 5, many


def test_the_engine_beside_it_takes_the_weights(model_dir: str) -> None:
    prompts = [(1, 2, 3), (4, 5)]
    requests = [new_request(i, prompt, GREEDY, 8) for i, prompt in enumerate(prompts)]

    def answered_on(device: torch.device) -> list[list[int]]:
        learner, _ = updated(model_dir, PLAIN, device)
        model = load_decoder(Path(model_dir))
        engine = NativeEngine(model, show, 2, 32, device, PolicyVersion(0))
        engine.swap_weights(PolicyVersion(1), learner.weights())
        done = answers(engine, requests)
        return [done[request.id].tokens for request in requests]

    expected = answered_on(CPU)
    with labelled_device():
        assert answered_on(CUDA) == expected
