"""The planner's figures for the native engine are the peaks of its live tensors."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.reference import new_request, show
from tests.live_tensor_bytes import LiveTensorBytes
from tests.memory_plan.models import job_of, save_policy, shape_of
from tlt.base.id_types import DrafterVersion, PolicyVersion
from tlt.base.strategies import Draft, Off
from tlt.engine.base import Sampling
from tlt.engine.native import NativeEngine
from tlt.memory_plan import Spread
from tlt.memory_plan.engine_memory import engine_items
from tlt.memory_plan.memory_items import peak_bytes
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.eagle_drafter import new_drafter
from tlt.ranks.job_sizes_from_spec import drafter_shape
from tlt.trainer.drafter.initial_drafter import drafter_config_for
from tlt.trainer.drafter.samples import state_layers

DEPTH = 4
# family, sizes of the policy, number format, slots, context, prompt
ENGINES: dict[str, tuple[Any, dict[str, Any], torch.dtype, int, int, int]] = {
    "float32": ("qwen2", {}, torch.float32, 8, 256, 250),
    "bfloat16, untied": (
        *("qwen3", {"vocab_size": 4000, "tie_word_embeddings": False}),
        *(torch.bfloat16, 4, 256, 250),
    ),
}


HOT_TOKENS = 1000


def decode(
    folder: Path, dtype: torch.dtype, slots: int, context: int, prompt: int, layout: str | None
) -> tuple[int, int, dict[str, Any]]:
    """Return what stays, the peak while requests are answered, and the job's fields."""
    model = load_decoder(folder, dtype)
    fields: dict[str, Any] = {}
    captured: tuple[int, ...] = ()
    drafter = None
    if layout is not None:
        config = drafter_config_for(model.config, layout, HOT_TOKENS)
        captured = state_layers(config, model.config.layers)
        drafter = new_drafter(config).to(dtype).requires_grad_(False)
        fields = {"drafter": drafter_shape(config), "captured": len(captured), "drafts": DEPTH}
    arms = (Off(), Draft(depth=DEPTH)) if layout is not None else ()
    with LiveTensorBytes() as live:
        engine = NativeEngine(
            *(model, show, slots, context, torch.device("cpu"), PolicyVersion(0), captured, arms)
        )
        del model
        if drafter is not None:
            engine.speculation.adopt_drafter(DrafterVersion(1), drafter)
            engine.speculation.set_strategy(Draft(depth=DEPTH))
            del drafter
        gc.collect()
        kept = live.now
        live.restart()
        engine.submit(
            [
                new_request(i, [(7 * i + j) % 90 for j in range(prompt)], Sampling(), 8)
                for i in range(slots + 2)
            ]
        )
        while engine.running:
            engine.step()
    return kept, live.peak, fields


@pytest.mark.parametrize("layout", [None, "eagle", "eagle3"])
@pytest.mark.parametrize("kind", ENGINES)
def test_decoding_takes_the_planned_bytes(tmp_path: Path, kind: str, layout: str | None) -> None:
    family, sizes, dtype, slots, context, prompt = ENGINES[kind]
    folder = save_policy(tmp_path, family, **sizes)
    kept, peak, fields = decode(folder, dtype, slots, context, prompt, layout)
    width = dtype.itemsize
    policy = shape_of(folder)
    job = job_of(policy, engine_width=width, slots=slots, max_context=context, **fields)
    items = tuple(engine_items(job, Spread(device="cpu")))
    assert sum(i.bytes for i in items if i.during == "always") == pytest.approx(kept, rel=0.001)
    assert peak_bytes(items) == pytest.approx(peak, rel=0.08)


@pytest.mark.parametrize("engine", ["native", "sglang"])
def test_devices_of_an_engine_divide_weights_and_cache(tmp_path: Path, engine: str) -> None:
    job = job_of(shape_of(save_policy(tmp_path, "qwen2")), engine=engine)
    alone, together = (
        {item.name: item.bytes for item in engine_items(job, Spread(tensor_parallel=count))}
        for count in (1, 2)
    )
    for name in ("engine: policy's weights", "engine: KV cache"):
        assert alone[name] == 2 * together[name] > 0
