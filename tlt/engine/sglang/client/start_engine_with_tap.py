"""Start an SGLang engine for a model folder: the tap first, then SGLang with its hooks."""

import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tlt.base.cuda_toolkit import build_environment
from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client import sglang_launcher
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.sglang_launcher import Launched
from tlt.engine.sglang.shared.frame_socket import FrameSocket
from tlt.engine.sglang.shared.scheduler_options import (
    SchedulerOptions,
    SpeculationOptions,
    complain_of_hooks,
)
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap, TapShape
from tlt.engine.sglang.shared.speculation_messages import FromScheduler, ToScheduler
from tlt.errors import ConfigError, RankError, UnsupportedModel
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import DecoderConfig
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
    speculation: SpeculationOptions | None = None,
    seed: int = 0,
    proposals: Path | None = None,
    cores: Sequence[Sequence[int]] = ((),),
    cache_tokens: int | None = None,
) -> tuple[SglangClient, Tap]:
    """Launch SGLang on `device` and those after it, one for each entry of `cores`.

    A scheduler may use the cores of its entry, or any if it is empty. `folder`, best in memory,
    holds the log and until it is mapped the tap. With speculation, `captured` must be the layers
    that the drafter reads, and the last state.
    """
    config = read_config(model)
    if config.mlp_bias:
        raise UnsupportedModel(f"{model}: SGLang has no biases in the feed-forward part")
    max_context = _usable_context(max_context, config, captured, speculation)
    shape = TapShape(
        slots=_SLOTS_PER_REQUEST * slots,
        positions=max_context,
        layers=len(captured),
        hidden=config.hidden,
        dtype=str(dtype).removeprefix("torch."),
    )
    _require_room(shape, slots, folder)
    path, adaptive = folder / "tap", folder / "adaptive.json"
    ours, theirs = socket.socketpair()
    options = SchedulerOptions(
        tap=str(path),
        shape=shape,
        device=str(device),
        proposals=None if proposals is None else str(proposals),
        speculation=speculation,
        socket=theirs.fileno(),
    )
    tools = build_environment(folder / "cuda") if device.type == "cuda" else {}
    if speculation is not None:
        adaptive.write_bytes(speculation.adaptive_config())
    tap = Tap.create(path, shape)
    try:
        launched = sglang_launcher.start(
            sglang_launcher.Options(
                model=model,
                device=device,
                dtype=dtype,
                cores=tuple(map(tuple, cores)),
                slots=slots,
                max_context=max_context,
                cache_tokens=cache_tokens,
                version=version,
                seed=seed,
                speculation=speculation,
                adaptive_config=adaptive,
                states=bool(captured),
                captured=tuple(layer for layer in captured if layer < config.layers),
                stuck_seconds=stuck_seconds,
                environment=options.environment() | tools,
                descriptors=(theirs.fileno(),),
            ),
            folder / "sglang.log",
        )
    except BaseException:
        ours.close()
        raise
    finally:
        path.unlink()
        theirs.close()
    steps = () if speculation is None else speculation.steps
    if (complaint := _complain_of_schedulers(launched, steps)) is not None:
        ours.close()
        launched.close()
        raise RankError(complaint)
    if speculation is None:
        ours.close()
        return SglangClient(launched, dtype, (), stuck_seconds), tap
    own = weight_names(Path(speculation.drafter), config.layers)
    frames = FrameSocket[ToScheduler, FromScheduler](ours, FromScheduler)
    return SglangClient(launched, dtype, own, stuck_seconds, frames), tap


def _require_room(shape: TapShape, slots: int, folder: Path) -> None:
    """Refuse a tap for which memory has no room: SIGBUS would end the scheduler that fills it."""
    free = shutil.disk_usage(folder).free
    if shape.bytes > free:
        raise ConfigError(
            f"rollout.slots: {slots} answers' tokens and hidden states may take "
            f"{shape.bytes / 1e9:.3g} GB, and {folder} has {free / 1e9:.3g} GB free; set fewer "
            "slots or a smaller policy.max_context, or make it larger (docker run --shm-size)"
        )


def _complain_of_schedulers(launched: Launched, steps: tuple[int, ...]) -> str | None:
    """Say which scheduler hasn't TLT's hooks, or return None if all have them."""
    for rank, said in enumerate(launched.said):
        if (complaint := complain_of_hooks(said, steps)) is not None:
            return f"SGLang's scheduler {rank} of {len(launched.said)}: {complaint}"
    return None


def _usable_context(
    wanted: int,
    config: DecoderConfig,
    captured: Sequence[int],
    speculation: SpeculationOptions | None,
) -> int:
    """Leave room for drafts at the end of the model's context."""
    ahead = sglang_launcher.positions_ahead(speculation, captured)
    return min(wanted, config.max_positions - ahead)


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
    captured: Sequence[int] = (),
    speculation: SpeculationOptions | None = None,
    cores: Sequence[Sequence[int]] = ((),),
    cache_tokens: int | None = None,
) -> SglangEngine:
    max_context = _usable_context(max_context, read_config(model), captured, speculation)
    client, tap = start_client(
        model,
        slots,
        max_context,
        device,
        dtype,
        version,
        folder,
        stuck_seconds,
        captured,
        speculation,
        seed=seed,
        cores=cores,
        cache_tokens=cache_tokens,
    )
    return SglangEngine(client, model, tap, decode_text, slots, max_context, version, device)
