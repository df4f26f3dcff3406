"""SGLang's `Engine` over scheduler processes that we started. Import it only from the launcher.

Upstream's other processes are left out: tokens go in and out, so nothing is detokenised, and no
thread kills this process when the scheduler ends.
"""

import asyncio
import signal
import traceback
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult
from sglang.srt.managers.load_snapshot import shm_path_for
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs

from tlt.engine.sglang.client.scheduler_process import SchedulerGroup
from tlt.errors import ConfigError

# files that upstream creates and doesn't remove
_SOCKETS = (
    "tokenizer_ipc_name",
    "scheduler_input_ipc_name",
    "detokenizer_ipc_name",
    "rpc_ipc_name",
    "metrics_ipc_name",
)
# what SGLang would divide besides weights, by its setting
_DIVISIONS = {
    "pp_size": "pipeline stages",
    "dp_size": "data parallelism",
    "attn_dp_size": "attention DP",
}


class Manager(TokenizerManager):
    """Upstream's client of the scheduler, without signal handlers."""

    reader: "asyncio.Task[None] | None" = None

    def auto_create_handle_loop(self) -> None:
        if self.reader is None:
            self.event_loop = asyncio.get_running_loop()
            self.reader = self.event_loop.create_task(self.handle_loop())

    def _calculate_spec_decoding_metrics(self, meta_info: Any, recv_obj: Any, i: int) -> None:
        """Do nothing: upstream reads the settings of the engine that was started last."""


class ExternalSchedulerEngine(Engine):
    loop: asyncio.AbstractEventLoop

    def __init__(self, schedulers: SchedulerGroup, **arguments: Any) -> None:
        # upstream passes these two to its class methods
        self.run_scheduler_process_func: Any = schedulers
        self.init_tokenizer_manager_func = self._open
        self._manager: Any = None
        try:
            super().__init__(custom_sigquit_handler=signal.SIG_IGN, **arguments)
        except BaseException:
            self._release()
            raise
        # the scheduler has mapped it; a process that is killed would leave it behind
        Path(shm_path_for(self.port_args.instance_id)).unlink(missing_ok=True)

    def _open(self, arguments: ServerArgs, ports: PortArgs) -> tuple[Manager, None]:
        """Create the client, without upstream's chat templates."""
        self.port_args = ports
        self._manager = Manager(arguments, ports)
        return self._manager, None

    @classmethod
    def _launch_scheduler_processes(
        cls, server_args: Any, port_args: PortArgs, run_scheduler_process_func: Any, **_: Any
    ) -> tuple[SchedulerInitResult, None]:
        _refuse_other_divisions(server_args)
        schedulers: SchedulerGroup = run_scheduler_process_func
        schedulers.send_setup(server_args, port_args, server_args.base_gpu_id)
        infos: list[dict[str, Any]] = []
        result = SchedulerInitResult(
            scheduler_infos=infos,
            all_child_pids=schedulers.pids,
            wait_for_ready=lambda: infos.extend(schedulers.ready()),
        )
        return result, None

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list[Any], list[str]]:
        return [], []

    @staticmethod
    def _ensure_event_loop() -> asyncio.AbstractEventLoop:
        return asyncio.new_event_loop()

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens SGLang can cache, as it found out at its start."""
        return self._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]

    def reader_failure(self) -> str | None:
        """Say why the scheduler's messages aren't read any more, or return None if they are."""
        reader: asyncio.Task[None] | None = self._manager.reader
        if reader is None or not reader.done():
            return None
        error = reader.exception()
        where = traceback.extract_tb(error.__traceback__)[-1] if error is not None else None
        return f"is not read from: {error!r} at {where}"

    def close(self) -> None:
        """Free everything, after the schedulers have ended."""
        self.loop.run_until_complete(_cancel(asyncio.all_tasks(self.loop)))
        self.loop.close()
        rpc: Any = self.send_to_rpc
        rpc.context.destroy(linger=0)
        self._release()

    def shutdown(self) -> None:
        """Do nothing: upstream would kill all children of this process."""

    def _release(self) -> None:
        if self._manager is None:
            return
        self._manager.recv_from_detokenizer.context.destroy(linger=0)
        for name in (getattr(self.port_args, field) for field in _SOCKETS):
            Path(name.removeprefix("ipc://")).unlink(missing_ok=True)
        Path(shm_path_for(self.port_args.instance_id)).unlink(missing_ok=True)


def _refuse_other_divisions(arguments: Any) -> None:
    """Raise ConfigError if SGLang would divide its work otherwise than our worker can follow."""
    for name, division in _DIVISIONS.items():
        if (parts := getattr(arguments, name)) != 1:
            raise ConfigError(
                f"engine sglang: {division} ({name}: {parts}) doesn't work with TLT's worker in "
                "SGLang, which divides a policy by rollout.tensor_parallel alone"
            )


async def _cancel(tasks: set["asyncio.Task[Any]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
