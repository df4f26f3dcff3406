"""The engine that a job asks for, over the policy in its folder."""

import tempfile
from pathlib import Path

import torch

from tlt.engine.base import Engine
from tlt.engine.native import NativeEngine
from tlt.models.config_file import read_config
from tlt.models.folder import load_decoder
from tlt.models.tokenizer import Tokenizer
from tlt.ranks.frames import Load
from tlt.types import PolicyVersion


def start_engine(load: Load, tokenizer: Tokenizer, device: torch.device) -> Engine:
    spec = load.spec
    folder, dtype = Path(spec.policy.path), getattr(torch, spec.policy.dtype)
    slots, context, version = spec.rollout.slots, context_of(load), PolicyVersion(0)
    match spec.rollout.engine:
        case "native":
            model = load_decoder(folder, dtype)
            return NativeEngine(model, tokenizer.decode, slots, context, device, version)
        case "sglang":
            # imported for a job that asks for it alone: it changes the process
            from tlt.engine.sglang import start

            place = Path(tempfile.mkdtemp(prefix="sglang-", dir=load.flight))
            return start.start_engine(
                folder,
                tokenizer.decode,
                slots,
                context,
                device,
                dtype,
                version,
                place,
                seed=spec.seed,
                stuck_seconds=spec.workers.stuck_seconds,
            )


def context_of(load: Load) -> int:
    """What a prompt and its answer may fill together."""
    policy = load.spec.policy
    positions = read_config(Path(policy.path)).max_positions
    return min(positions, policy.max_context or positions)
