"""Compiling layers can make a job faster and nothing else: what fails in it costs a log line.

torch keeps what it compiled in its own cache (TORCHINDUCTOR_CACHE_DIR), which processes may share.
"""

import time
from collections.abc import Callable

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tlt.config import AlgorithmSpec
from tlt.trainer.policy.fused_layers import restore, unfuse
from tlt.trainer.policy.layer_probe import LayerProbe, decoder_layers
from tlt.trainer.policy.micro_batches import MicroBatch

# Measured with an empty cache: from 68 to 131, the more the busier the machine.
_SECONDS = 130.0
# of an update, measured: norms and gates are fused without a compiler of graphs, too
_SAVED = 0.05

_log = structlog.get_logger("learn")


def is_compiling_worthwhile(spec: AlgorithmSpec, step: int, last_update_seconds: float) -> bool:
    """Whether what is left of the job saves more than compiling costs."""
    left = spec.steps - step
    return left * last_update_seconds * _SAVED > _SECONDS


def compile_layers(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool, forced: bool) -> bool:
    """One graph serves all layers and lengths.

    False if it cannot be had, or isn't faster and nobody insists.
    """
    layers = decoder_layers(model)
    if not layers:
        return False
    began = time.monotonic()
    before = after = float("inf")
    compiled, reason = False, "it is not faster"
    fused: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    try:
        probe = LayerProbe(model, batch.tokens, batch.bounds)
        before = probe.seconds(bfloat16)
        # The compiler fuses more than our kernels do, if it can see what there is.
        fused = unfuse(model)
        _fall_back(False)
        for layer in layers:
            layer.compile(dynamic=True)
        after = probe.seconds(bfloat16)
        if forced or after < before:
            # The pass for old log-probs has a graph of its own: now, and not in the update.
            probe.forward(bfloat16)
            compiled = True
    except Exception as error:  # compilers raise whatever they like
        reason = " ".join(str(error).split())[:200]
    if not compiled:
        for layer in layers:
            layer._compiled_call_impl = None  # pyright: ignore
        restore(fused)
    # A graph that is wanted later, for a shape that is new, may still fail.
    _fall_back(True)
    _log.info(
        "layers compiled" if compiled else "layers stay as they are",
        **({} if compiled else {"reason": reason}),
        milliseconds=(round(1000 * before, 2), round(1000 * after, 2)),
        seconds=round(time.monotonic() - began, 1),
    )
    return compiled


def _fall_back(wanted: bool) -> None:
    """Whether what cannot be compiled runs as it was written, or raises."""
    torch._dynamo.config.suppress_errors = wanted  # pyright: ignore
