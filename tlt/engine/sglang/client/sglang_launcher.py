"""Launch SGLang for a rank: a scheduler a device in child processes, their client in this one.

Both import SGLang at the same time, which is most of a start. Nothing else imports it.
"""

import importlib
import importlib.metadata
import importlib.util
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from tlt.engine.sglang.client.process_state_guard import restore_process_state
from tlt.engine.sglang.client.scheduler_process import SchedulerGroup
from tlt.engine.sglang.cpu import cpu_mode
from tlt.engine.sglang.shared.scheduler_options import SpeculationOptions
from tlt.errors import ConfigError, RankError, TltError
from tlt.memory_plan.graph_captures import plan_captures

VERSION = "0.5.23"
# the last kernels for PyTorch 2.11, which are packed without FlashAttention 3; SGLang wants others
_PACKED_KERNELS = "0.4.5"
_ANY_KERNELS = {"SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}

# more than SGLang chooses to draft where states are captured without a drafter
_UNUSED_DRAFTS = 32
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tlt.engine.sglang.scheduler.models",
}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: Path
    # the first of the devices among which each weight is divided
    device: torch.device
    dtype: torch.dtype
    # by device: the cores of its scheduler, or none if it may use all
    cores: tuple[tuple[int, ...], ...] = ((),)
    # requests that decode at once, and the most tokens of each
    slots: int
    max_context: int
    # tokens of all requests that are cached together; None: all that the slots may need
    cache_tokens: int | None = None
    # the policy version of the model's weights
    version: int = 0
    seed: int = 0
    speculation: SpeculationOptions | None = None
    # the file of `SpeculationOptions.adaptive_config`
    adaptive_config: Path | None = None
    # the scheduler returns each token's last state, and without a drafter, which names its own
    # layers, the states at the entrances of `captured` layers
    states: bool = False
    captured: tuple[int, ...] = ()
    # a start in which nothing is done for so long has failed
    stuck_seconds: float = 120.0
    # of the schedulers' processes only; `descriptors` of the first
    environment: Mapping[str, str] = {}
    descriptors: tuple[int, ...] = ()


class Launched:
    """A running SGLang; it makes progress here only while `engine.loop` runs."""

    def __init__(self, engine: Any, schedulers: SchedulerGroup) -> None:
        self.engine = engine
        self._schedulers = schedulers

    @property
    def schedulers(self) -> list[int]:
        """Return the schedulers' process ids."""
        return self._schedulers.pids

    @property
    def said(self) -> list[dict[str, Any]]:
        """Return by scheduler what it said of itself when it became ready."""
        return self._schedulers.said

    def failure(self) -> str | None:
        """Say how a scheduler ended, with its last lines, or return None while all run."""
        return self._schedulers.failure() or self.engine.reader_failure()

    def last_lines(self) -> str:
        """Return the last lines of the schedulers' logs."""
        return self._schedulers.last_lines()

    def kill(self) -> None:
        """Kill the schedulers; all later calls fail."""
        self._schedulers.kill()

    def close(self) -> None:
        self._schedulers.kill()
        self.engine.close()


def start(options: Options, log: Path) -> Launched:
    """Start SGLang from the main thread; the schedulers append their output to `log`.

    This process ignores SIGQUIT from now on, because a failing scheduler sends it.
    """
    check_version()
    _check_cache(options)
    on_cpu = options.device.type == "cpu"
    variables = _VARIABLES | (cpu_mode.environment(len(options.cores)) if on_cpu else {})
    if kernel_arguments(_kernels()):
        variables |= _ANY_KERNELS
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    with _memory_saver(options.device):
        schedulers = SchedulerGroup(
            options.device.type,
            {**variables, **options.environment},
            log,
            options.cores,
            options.descriptors,
            options.stuck_seconds,
        )
    try:
        with restore_process_state(variables):
            if on_cpu:
                cpu_mode.enter()
            from tlt.engine.sglang.client.external_scheduler_engine import ExternalSchedulerEngine

            engine = ExternalSchedulerEngine(schedulers, **_arguments(options))
    except BaseException as error:
        schedulers.kill()
        if isinstance(error, TltError) or not isinstance(error, Exception):
            raise
        if isinstance(error, (OSError, MemoryError)):
            raise RankError(f"SGLang cannot be started here: {error}") from error
        raise ConfigError(f"engine sglang: SGLang refuses {options.model}: {error}") from error
    finally:
        cpu_mode.leave()
    launched = Launched(engine, schedulers)
    if (complaint := _complain_of_pool(options, engine.cached_tokens)) is not None:
        launched.close()
        raise ConfigError(complaint)
    return launched


def can_free_memory(device: torch.device) -> bool:
    """Return True if SGLang can free its cache for a while, as torch-memory-saver lets it."""
    return device.type == "cuda" and importlib.util.find_spec("torch_memory_saver") is not None


def _memory_saver(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which child processes allocate memory that can be freed for a while."""
    if not can_free_memory(device):
        return nullcontext()
    return importlib.import_module("torch_memory_saver").configure_subprocess()


def check_version() -> None:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "engine sglang: SGLang is not installed; pip install sglang==0.5.23, "
            "or `make setup` for a machine without a GPU"
        ) from None
    if version != VERSION:
        raise ConfigError(f"engine sglang: SGLang is {version}, and only {VERSION} is supported")


def _arguments(options: Options) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(options.model),
        "device": options.device.type,
        "base_gpu_id": options.device.index or 0,
        "tp_size": len(options.cores),
        "dtype": str(options.dtype).removeprefix("torch."),
        "max_running_requests": options.slots,
        "context_length": _positions(options),
        "max_total_tokens": _cache_tokens(options),
        "random_seed": options.seed,
        "weight_version": str(options.version),
        "skip_tokenizer_init": True,
        # otherwise it spins on a core that the rank may train on
        "sleep_on_idle": True,
        "enable_return_hidden_states": options.states,
        "enable_memory_saver": can_free_memory(options.device),
        "log_level": "error",
    }
    if options.captured and options.speculation is None:
        arguments |= {
            "enable_return_aux_hidden_states": True,
            # without a drafter this only selects how layers are numbered
            "speculative_algorithm": "EAGLE3",
            "return_aux_hidden_state_layer_ids": [layer - 1 for layer in options.captured],
        }
    if options.device.type == "cpu":
        arguments |= cpu_mode.arguments()
    else:
        arguments |= graph_arguments(options.slots, _lengths(options))
    arguments |= kernel_arguments(_kernels())
    if (speculation := options.speculation) is not None:
        most = speculation.steps[-1]
        arguments |= {
            "speculative_algorithm": speculation.algorithm,
            "speculative_draft_model_path": speculation.drafter,
            "speculative_num_steps": most,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": most + 1,
            "speculative_adaptive": True,
            "speculative_adaptive_config": str(options.adaptive_config),
        }
    return arguments


def kernel_arguments(version: str | None) -> dict[str, Any]:
    """Return what SGLang decodes with if this version of its kernels is installed."""
    if version != _PACKED_KERNELS:
        return {}
    return {"attention_backend": "triton", "sampling_backend": "pytorch"}


def _kernels() -> str | None:
    try:
        return importlib.metadata.version("sglang-kernel")
    except importlib.metadata.PackageNotFoundError:
        return None


def graph_arguments(slots: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Return for which batch sizes SGLang captures graphs; never for prefills."""
    sizes = list(plan_captures(slots, lengths).sizes)
    decode = {"cuda_graph_bs_decode": sizes} if sizes else {"disable_decode_cuda_graph": True}
    return {"disable_prefill_cuda_graph": True, **decode}


def _lengths(options: Options) -> Sequence[int]:
    return (0,) if options.speculation is None else options.speculation.steps


def _cache_tokens(options: Options) -> int:
    worst = options.slots * _positions(options)
    return worst if options.cache_tokens is None else min(worst, options.cache_tokens)


def _check_cache(options: Options) -> None:
    """Refuse a cache that a single request may exceed: SGLang would cut its answer off."""
    if (tokens := _cache_tokens(options)) < _positions(options):
        raise ConfigError(
            f"rollout.cache_tokens: {tokens} tokens are fewer than the {_positions(options)} that "
            f"one answer may take, {options.max_context} of context and its drafts; set at least "
            "that many, auto, or a smaller policy.max_context"
        )


def _complain_of_pool(options: Options, tokens: int) -> str | None:
    """Say if SGLang found less memory than one request may need, or return None."""
    if tokens >= _positions(options):
        return None
    return (
        f"engine sglang: {options.device} has room for {tokens} cached tokens, and one answer may "
        f"take {_positions(options)}; set a smaller policy.max_context or rollout.slots"
    )


def _positions(options: Options) -> int:
    """Return the positions of one request, including those of its drafts."""
    return options.max_context + positions_ahead(options.speculation, options.captured)


def positions_ahead(speculation: SpeculationOptions | None, captured: Sequence[int]) -> int:
    """Return the positions that SGLang keeps for drafts: it counts them as part of a context."""
    if speculation is not None:
        return 2 * (speculation.steps[-1] + 1)
    return _UNUSED_DRAFTS if captured else 0
