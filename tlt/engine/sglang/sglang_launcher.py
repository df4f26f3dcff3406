"""Starts SGLang for a rank: its scheduler in a child, its front in this process.

Both import SGLang at the same time, which is most of what a start takes. Nothing else imports it.
"""

import importlib.metadata
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from tlt.engine.sglang.cpu import cpu_mode
from tlt.engine.sglang.process_state_guard import restore_process_state
from tlt.engine.sglang.scheduler_process import SchedulerProcess
from tlt.errors import ConfigError, RankError, TltError

VERSION = "0.5.23"

_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tlt.engine.sglang.models",
}


class DrafterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Speculation with a drafter that proposes one chain of `steps` tokens."""

    algorithm: Literal["EAGLE", "EAGLE3"]
    drafter: Path
    steps: int


class Options(msgspec.Struct, frozen=True, kw_only=True):
    model: Path
    device: torch.device
    dtype: torch.dtype
    # requests that decode at once, and the tokens that each may grow to
    slots: int
    max_context: int
    # what answers say that their tokens come from, until the weights are updated
    version: int = 0
    seed: int = 0
    drafts: DrafterOptions | None = None
    # states are kept for whoever reads along in the scheduler: the last one of each token, and
    # without a drafter, which says it itself, those at these layers' entrances
    states: bool = False
    captured: tuple[int, ...] = ()
    # for the scheduler's process alone
    environment: Mapping[str, str] = {}


class Launched:
    """A running engine. `engine.loop` drives it, and only while somebody runs that loop."""

    def __init__(self, engine: Any, scheduler: SchedulerProcess) -> None:
        self.engine = engine
        self._scheduler = scheduler

    @property
    def scheduler(self) -> int:
        """Its process id."""
        return self._scheduler.pid

    def died(self) -> str | None:
        """How the scheduler ended, with its last lines; None while it lives and is listened to."""
        return self._scheduler.died() or self.engine.deaf()

    def last_lines(self) -> str:
        """Of what the scheduler said."""
        return self._scheduler.last_lines()

    def kill(self) -> None:
        """From now on it is dead for everybody."""
        self._scheduler.kill()

    def close(self) -> None:
        self._scheduler.kill()
        self.engine.close()


def start(options: Options, log: Path) -> Launched:
    """What the scheduler says goes to the end of `log`.

    To be called by the main thread. From now on it ignores SIGQUIT: a failing scheduler sends it.
    """
    check_version()
    on_cpu = options.device.type == "cpu"
    variables = _VARIABLES | (cpu_mode.environment() if on_cpu else {})
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    scheduler = SchedulerProcess(options.device.type, {**variables, **options.environment}, log)
    try:
        with restore_process_state(variables):
            if on_cpu:
                cpu_mode.enter()
            from tlt.engine.sglang.external_scheduler_engine import ExternalSchedulerEngine

            engine = ExternalSchedulerEngine(scheduler, **_arguments(options))
    except BaseException as error:
        scheduler.kill()
        if isinstance(error, TltError) or not isinstance(error, Exception):
            raise
        if isinstance(error, (OSError, MemoryError)):
            raise RankError(f"SGLang cannot be started here: {error}") from error
        raise ConfigError(f"engine sglang: SGLang refuses {options.model}: {error}") from error
    finally:
        cpu_mode.leave()
    return Launched(engine, scheduler)


def check_version() -> None:
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "engine sglang: SGLang is not installed; pip install 'tlt-rl[sglang]', "
            "or `make setup` for a machine without a GPU"
        ) from None
    if version != VERSION:
        raise ConfigError(f"engine sglang: SGLang is {version}, and only {VERSION} is supported")


def _arguments(options: Options) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(options.model),
        "device": options.device.type,
        "base_gpu_id": options.device.index or 0,
        "dtype": str(options.dtype).removeprefix("torch."),
        "max_running_requests": options.slots,
        "context_length": options.max_context,
        "max_total_tokens": options.slots * _positions(options),
        "random_seed": options.seed,
        "weight_version": str(options.version),
        "skip_tokenizer_init": True,
        # it would spin otherwise, on a core that the rank may learn on
        "sleep_on_idle": True,
        "enable_return_hidden_states": options.states,
        "log_level": "error",
    }
    if options.captured and options.drafts is None:
        arguments |= {
            "enable_return_aux_hidden_states": True,
            # it only names the convention for the layers here
            "speculative_algorithm": "EAGLE3",
            "return_aux_hidden_state_layer_ids": [layer - 1 for layer in options.captured],
        }
    if options.device.type == "cpu":
        arguments |= cpu_mode.arguments()
    if (drafts := options.drafts) is not None:
        arguments |= {
            "speculative_algorithm": drafts.algorithm,
            "speculative_draft_model_path": str(drafts.drafter),
            "speculative_num_steps": drafts.steps,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": drafts.steps + 1,
        }
    return arguments


def _positions(options: Options) -> int:
    """Of one request in the cache: its own, and those of the drafts that it is ahead of."""
    ahead = 0 if options.drafts is None else 2 * (options.drafts.steps + 1)
    return options.max_context + ahead
