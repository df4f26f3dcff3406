"""Compiling layers may make a job faster and does nothing else: a failure costs a log line.

A job waits for the compiler once, and a log line announces that: later shapes run uncompiled. torch
keeps what it compiled in its own cache (TORCHINDUCTOR_CACHE_DIR), which processes may share.
"""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import structlog
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tlt.base.human_format import one_line
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.policy.model.micro_batches import MicroBatch
from tlt.trainer.policy.speed.fused_layers import restore, unfuse
from tlt.trainer.policy.speed.layer_probe import LayerProbe, decoder_layers

# time to compile with an empty cache: 68 to 131 were measured, more on a busy machine
_COMPILE_SECONDS = 130.0
# measured part of an update that compiling saves where norms and gates are fused already
_SAVED_PART = 0.05

_log = structlog.get_logger("trainer")


def is_compiling_worthwhile(spec: AlgorithmSpec, step: int, last_update_seconds: float) -> bool:
    """Return True if the rest of the job saves more than compiling costs."""
    steps_left = spec.steps - step
    return steps_left * last_update_seconds * _SAVED_PART > _COMPILE_SECONDS


@contextmanager
def compiler_running() -> Generator[None]:
    """Compile what is called meanwhile; afterwards nothing is compiled, and other shapes run as is.

    A job that compiled in the middle of an update would stall without a word.
    """
    torch.compiler.set_stance("default")
    try:
        yield
    finally:
        torch.compiler.set_stance("eager_on_recompile")


def compile_layers(model: PreTrainedModel, batch: MicroBatch, bfloat16: bool, forced: bool) -> bool:
    """Compile one graph for all layers and lengths.

    Return False if that fails, or if it isn't faster and not forced.
    """
    layers = decoder_layers(model)
    if not layers:
        return False
    began = time.monotonic()
    _log.info(
        "compiling the layers, and the update waits",
        seconds=_COMPILE_SECONDS,
        avoided_by="algorithm.compile: false",
    )
    before = after = float("inf")
    compiled, reason = False, "it is not faster"
    fused: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    try:
        probe = LayerProbe(model, batch.tokens, batch.bounds)
        before = probe.seconds(bfloat16)
        # the compiler fuses more than our kernels do, if they don't hide the operations
        fused = unfuse(model)
        for layer in layers:
            layer.compile(dynamic=True)
        after = probe.seconds(bfloat16)
        if forced or after < before:
            # the pass for old log-probs has a graph of its own: compile it before the update
            probe.forward(bfloat16)
            compiled = True
    except Exception as error:  # compilers raise whatever they like
        reason = one_line(error)
    if not compiled:
        for layer in layers:
            layer._compiled_call_impl = None  # pyright: ignore
        restore(fused)
    _log.info(
        "layers compiled" if compiled else "layers stay as they are",
        **({} if compiled else {"reason": reason}),
        milliseconds=(round(1000 * before, 2), round(1000 * after, 2)),
        seconds=round(time.monotonic() - began, 1),
    )
    return compiled
