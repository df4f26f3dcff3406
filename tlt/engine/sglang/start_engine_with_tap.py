"""Start an SGLang engine for a model folder: the tap first, then SGLang with its plugin."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tlt.engine.sglang import hidden_state_hooks, sglang_launcher
from tlt.engine.sglang.engine import SglangEngine
from tlt.engine.sglang.sglang_client import SglangClient
from tlt.engine.sglang.sglang_launcher import DrafterOptions
from tlt.engine.sglang.shared_hidden_state_buffer import Tap, TapShape
from tlt.errors import UnsupportedModel
from tlt.id_types import PolicyVersion
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import weight_names

# tap slots per decoding request, so that SGLang always has requests waiting
_SLOTS_PER_REQUEST = 2


def start_client(
    model: Path,
    slots: int,
    max_context: int,
    device: torch.device,
    dtype: torch.dtype,
    version: PolicyVersion,
    folder: Path,
    stuck_seconds: float,
    captured: Sequence[int] = (),
    drafts: DrafterOptions | None = None,
    seed: int = 0,
    proposals: Path | None = None,
) -> tuple[SglangClient, Tap]:
    """Launch SGLang; `folder`, best in memory, holds the log and until it is mapped the tap.

    With a drafter, `captured` must be the layers that it reads, and the last state.
    """
    config = read_config(model)
    if config.mlp_bias:
        raise UnsupportedModel(f"{model}: SGLang has no biases in the feed-forward part")
    shape = TapShape(
        slots=_SLOTS_PER_REQUEST * slots,
        positions=max_context,
        layers=len(captured),
        hidden=config.hidden,
        dtype=str(dtype).removeprefix("torch."),
    )
    path = folder / "tap"
    options = hidden_state_hooks.Options(
        tap=str(path), shape=shape, proposals=None if proposals is None else str(proposals)
    )
    tap = Tap.create(path, shape)
    try:
        launched = sglang_launcher.start(
            sglang_launcher.Options(
                model=model,
                device=device,
                dtype=dtype,
                slots=slots,
                max_context=max_context,
                version=version,
                seed=seed,
                drafts=drafts,
                states=bool(captured),
                captured=tuple(layer for layer in captured if layer < config.layers),
                environment=options.environment(),
            ),
            folder / "sglang.log",
        )
    finally:
        path.unlink()
    own = () if drafts is None else weight_names(drafts.drafter, config.layers)
    return SglangClient(launched, dtype, own, stuck_seconds), tap


def start_engine(
    model: Path,
    decode_text: Callable[[Sequence[int]], str],
    slots: int,
    max_context: int,
    device: torch.device,
    dtype: torch.dtype,
    version: PolicyVersion,
    folder: Path,
    seed: int,
    stuck_seconds: float,
) -> SglangEngine:
    client, tap = start_client(
        model, slots, max_context, device, dtype, version, folder, stuck_seconds, seed=seed
    )
    return SglangEngine(client, read_config(model), tap, decode_text, slots, max_context, version)
