"""The planner's figures for drafter training are the peaks of its live tensors."""

import gc
import itertools
from typing import Any

import pytest
import torch

from tests.live_tensor_bytes import LiveTensorBytes
from tests.memory_plan.models import job_of
from tlt.memory_plan import DrafterShape, ModelShape, Spread, drafter_memory
from tlt.memory_plan.drafter_memory import drafter_training_items, learner_state_bytes
from tlt.models.eagle_drafter import DrafterConfig, new_drafter
from tlt.models.rope import PlainRope
from tlt.ranks.job_sizes_from_spec import drafter_shape
from tlt.trainer.drafter import chain_attention, drafter_learner
from tlt.trainer.drafter.delta_merging import BaseWeights, Delta, merge_deltas
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.micro_batches import Window, build_batch
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead
from tlt.trainer.policy.model import logprobs

CPU = torch.device("cpu")
LAYERS, CHUNK = 5, 2**17
EAGLE3: dict[str, Any] = {"layout": "eagle3", "captured": (1, 2, 4)}
# changes of the drafter's shape, tokens of the answer, rows of the micro-batch
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "whole answer": ({}, 514, 512),
    "window of a long answer": ({}, 2050, 256),
    "window in several blocks": ({"hidden": 64, "intermediate": 128, "head_dim": 16}, 4098, 512),
    "more weights than activations": ({"hidden": 256, "heads": 8, "intermediate": 1024}, 66, 64),
    "eagle3": (EAGLE3, 514, 512),
    "eagle3 with a head": (EAGLE3 | {"own_head": 500}, 514, 512),
    "some tokens": ({"hidden": 256, "vocabulary": 6000, "hot_tokens": 4000}, 66, 64),
}


def config(**changes: Any) -> DrafterConfig:
    settings: dict[str, Any] = {
        "layout": "eagle",
        "hidden": 128,
        "intermediate": 512,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 32,
        "norm_eps": 1e-6,
        "rope": PlainRope(theta=1e4),
        "max_positions": 128,
        "vocabulary": 1000,
        "captured": (LAYERS,),
    }
    return DrafterConfig(**(settings | changes))


def measure_training(config: DrafterConfig, states: int, length: int, rows: int) -> list[int]:
    """Return the bytes of the member's state, and the peak of its second micro-batch.

    Without those of the policy's embedding and head, and of the sample.
    """
    embedding, head = torch.randn(2, config.vocabulary, config.hidden)
    sample = DrafterSample(
        tokens=[i % config.vocabulary for i in range(length)],
        prompt=3,
        states=torch.randn(length - 1, states, config.hidden),
    )
    outside = sum(tensor.untyped_storage().nbytes() for tensor in (embedding, sample.states))
    shape = drafter_shape(config)
    with LiveTensorBytes() as live:
        learner = DrafterLearner(
            new_drafter(config),
            EmbeddingAndHead(embedding=embedding, head=head),
            DrafterHyperparameters(),
            torch.ones(shape.fusion[1]),
        )
        live.meet(sample.states)
        live.meet(embedding)
        gc.collect()
        kept = live.now - outside
        for _ in range(2):
            live.restart()
            window = Window(sample=0, first=length - 2 - rows, last=length - 2)
            learner.learn(build_batch([sample], [window], 4, CPU))
    return [kept, live.peak - outside]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_micro_batch_takes_the_planned_bytes(
    monkeypatch: pytest.MonkeyPatch, case: str, stored: bool
) -> None:
    """Scores are stored for the backward pass if they are few."""
    for module, name in ((chain_attention, "MOST_STORED"), (drafter_memory, "_MOST_STORED")):
        monkeypatch.setattr(module, name, 1 << 40 if stored else 0)
    # as on a GPU, where attention isn't C
    monkeypatch.setattr(drafter_learner, "load_kernels", lambda: None)
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", CHUNK)
    changes, length, rows = CASES[case]
    shape = drafter_shape(made := config(**changes))
    states = 1 if made.layout == "eagle" else 4
    kept, peak = measure_training(made, states, length, rows)
    state = learner_state_bytes(shape, 4)
    assert state == pytest.approx(kept, rel=0.01)
    job = job_of(
        policy_of(shape),
        drafter=shape,
        trains_drafter=True,
        captured=states,
        max_context=length,
    )
    items = list(drafter_training_items(job, Spread(device="cpu"), rows, CHUNK))
    (micro_batch,) = [item.bytes for item in items if item.during == "drafter training"]
    assert micro_batch == pytest.approx(peak - state, rel=0.1)


def test_weights_are_counted_as_the_drafter_has_them() -> None:
    for changes in ({}, EAGLE3, EAGLE3 | {"own_head": 500}):
        made = config(**changes)
        actual = sum(p.numel() for p in new_drafter(made).parameters())
        assert drafter_shape(made).weights == actual


def test_a_job_that_trains_no_drafter_takes_nothing_for_it() -> None:
    shape = drafter_shape(config())
    job = job_of(policy_of(shape), drafter=shape, trains_drafter=False)
    assert list(drafter_training_items(job, Spread())) == []


def policy_of(drafter: DrafterShape) -> ModelShape:
    return ModelShape(
        vocabulary=drafter.vocabulary,
        hidden=drafter.hidden,
        intermediate=drafter.intermediate,
        layers=LAYERS,
        heads=drafter.heads,
        kv_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        head_norms=False,
    )


def test_a_merge_takes_the_planned_bytes() -> None:
    """However many deltas are merged, one is held at a time."""
    made = config(hidden=256, intermediate=1024, heads=8)
    drafter = dict(new_drafter(made).state_dict())

    def weights_and_mean() -> dict[str, torch.Tensor]:
        both = itertools.product(("weights", "mean"), drafter.items())
        return {f"{kind}.{name}": torch.randn_like(weight) for kind, (name, weight) in both}

    with LiveTensorBytes() as live:
        base = BaseWeights(tensors=weights_and_mean(), updates=0, micro_batches=0)
        live.restart()
        deltas = (
            Delta(tensors=weights_and_mean(), micro_batches=1, previous_micro_batches=0)
            for _ in range(6)
        )
        merged = merge_deltas(base, deltas, 6)
        built = {name: merged.tensors[f"mean.{name}"].clone() for name in drafter}
        peak = live.peak
    shape = drafter_shape(made)
    job = job_of(policy_of(shape), drafter=shape, trains_drafter=True, captured=1, max_context=64)
    items = drafter_training_items(job, Spread(device="cpu"))
    (planned,) = [item.bytes for item in items if item.during == "drafter merge"]
    assert planned == pytest.approx(peak, rel=0.1)
    del built
