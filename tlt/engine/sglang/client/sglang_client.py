"""A client of SGLang with token ids in and out, in which every call ends or raises RankError.

The event loop runs only inside `run`; at other times the scheduler's messages wait in its socket.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import msgspec
import structlog
import torch

from tlt.base.id_types import DrafterVersion, PolicyVersion, StopReason
from tlt.engine.base import Request, Sampling
from tlt.engine.sglang.client.sglang_launcher import Launched
from tlt.engine.sglang.client.stuck_watch import StuckWatch, tree_busy_seconds
from tlt.engine.sglang.client.weight_parts_and_checksums import (
    PART_BYTES,
    Checksums,
    ConvertedWeights,
    checksums_of,
    compare,
    drafter_as_held,
    parts_of,
)
from tlt.engine.sglang.shared.frame_socket import FrameSocket
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName
from tlt.engine.sglang.shared.speculation_messages import (
    FromScheduler,
    NotePolicySwap,
    ToScheduler,
    UseDrafter,
)
from tlt.errors import ConfigError, RankError
from tlt.protocol.shared_values import StrategyTally

_T = TypeVar("_T")
_Runner = Literal["target", "draft"]
_log = structlog.get_logger("sglang")
# SGLang's tags of what requests need
_REQUEST_MEMORY = ["kv_cache"]


class PartialAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens of an answer so far."""

    tokens: list[int]
    logprobs: list[float]
    # None while the request runs
    stop: StopReason | None
    # why SGLang gave the request up, if it did
    complaint: str = ""
    # how often SGLang retracted it
    retractions: int = 0


class SglangClient:
    def __init__(
        self,
        launched: Launched,
        dtype: torch.dtype,
        drafter_weights: Collection[str],
        stuck_seconds: float,
        socket: FrameSocket[ToScheduler, FromScheduler] | None = None,
    ) -> None:
        """Treat a call without progress for `stuck_seconds` as stuck, and one that computes later.

        `socket` leads to the scheduler's speculating worker; without it nothing is proposed.
        """
        self._dtype = dtype
        self._drafter_weights = frozenset(drafter_weights)
        # drafters adopted since the start
        self.drafters = 0
        self.stuck_seconds = stuck_seconds
        self._launched = launched
        self._calls = self.watch()
        self._engine = launched.engine
        self._manager = launched.engine.tokenizer_manager
        # to the speculating worker in the scheduler, if there is one
        self._socket = socket
        self._tallies: list[StrategyTally] = []
        # the last checksums of each runner's weights; None after they turned out to be foreign
        self._held: dict[_Runner, Checksums] | None = {}
        # a checksum of SGLang's was once ours, too
        self._hashes_agree = False
        # True while SGLang's cache is freed
        self.released = False
        self._loop: asyncio.AbstractEventLoop = launched.engine.loop

    @property
    def schedulers(self) -> list[int]:
        """Return the process ids of SGLang's schedulers."""
        return self._launched.schedulers

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine until it is done, or raise if the scheduler dies."""
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(self._while_alive(task))
        finally:
            task.cancel()

    def watch(self) -> StuckWatch:
        """Return a watch over SGLang's schedulers."""
        pids = self._launched.schedulers
        return StuckWatch(self.stuck_seconds, lambda: tree_busy_seconds(pids))

    def start(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Start a task that makes progress whenever `run` is called."""
        return self._loop.create_task(work)

    async def generate(
        self, request: Request, name: RequestName, most: int, streamed: bool
    ) -> AsyncIterator[PartialAnswer]:
        """Yield the answer so far, of at most `most` tokens: repeatedly if `streamed`, or once."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        generation = GenerateReqInput(
            rid=name.write(),
            input_ids=list(request.prompt),
            sampling_params=_sampling_params(request, most),
            return_logprob=True,
            stream=streamed,
            cache_salt=name.salt,
        )
        async for output in self._manager.generate_request(generation, None):
            yield _part(output)

    async def abort(self, *names: RequestName) -> None:
        for name in names:
            self._manager.abort_request(rid=name.write())

    async def update_policy(
        self, weights: Mapping[str, torch.Tensor], version: PolicyVersion
    ) -> None:
        """Update weights; running requests continue with their old cache."""
        async with self._paused():
            sent = await self._update(weights, "target", str(version))
            await self._compare(sent, "target", f"policy version {version}")
            self.send(NotePolicySwap())

    async def update_drafter(
        self, weights: Mapping[str, torch.Tensor], version: DrafterVersion
    ) -> None:
        """Update the drafter's own weights; SGLang would write any others into the policy."""
        if foreign := weights.keys() - self._drafter_weights:
            raise ConfigError(f"{min(foreign)} is no weight of the drafter's own")
        if missing := self._drafter_weights - weights.keys():
            raise ConfigError(f"the drafter's weight {min(missing)} is missing")
        async with self._paused():
            sent = await self._update(weights, "draft", None)
            await self._compare(sent, "draft", f"drafter version {version}")
            self.send(UseDrafter(version=version))
        self.drafters += 1

    async def release_memory(self) -> None:
        """Free SGLang's cache once its last batch is over; weights and graphs stay."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self.released:
            return
        # it waits until nothing runs; releasing would end the scheduler if something did
        flushed = await self._manager.flush_cache(timeout_s=self.stuck_seconds)
        if not flushed.success:
            raise RankError(f"SGLang didn't become idle: {flushed.message}")
        tags = ReleaseMemoryOccupationReqInput(tags=_REQUEST_MEMORY)
        await self._manager.release_memory_occupation(tags)
        self.released = True

    async def resume_memory(self) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if self.released:
            tags = ResumeMemoryOccupationReqInput(tags=_REQUEST_MEMORY)
            await self._manager.resume_memory_occupation(tags)
            self.released = False

    def forbid_drafter(self) -> None:
        """Propose with no drafter until the next one is sent."""
        self.send(UseDrafter(version=None))
        self.drafters += 1

    def send(self, message: ToScheduler) -> None:
        """Send a message to the speculating worker; it is read before the next step."""
        if self._socket is not None:
            self._socket.send(message)

    def exchange(self) -> None:
        """Send what is left to be sent, and read what the speculating worker has reported."""
        if self._socket is None:
            return
        self._socket.flush()
        for message in self._socket.receive():
            self._tallies += message.tallies

    def take_tallies(self) -> tuple[StrategyTally, ...]:
        """Return what the speculating worker has decoded, as far as it has reported."""
        self.exchange()
        taken, self._tallies = tuple(self._tallies), []
        return taken

    @asynccontextmanager
    async def _paused(self) -> AsyncGenerator[None]:
        """Pause all requests; after a failure, which may leave mixed weights, kill SGLang."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        await self._manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        try:
            yield
        except BaseException:
            self._launched.kill()
            raise
        await self._manager.continue_generation(ContinueGenerationReqInput())

    async def _update(
        self, weights: Mapping[str, torch.Tensor], selector: _Runner, version: str | None
    ) -> dict[str, list[str]]:
        """Send weights in parts; return the checksums of what SGLang should hold now."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self._manager
        if self._held is not None and selector not in self._held:
            self._held[selector] = await self._checksums(selector)
        serialize: Any = MultiprocessingSerializer.serialize
        await manager.begin_weight_update(BeginWeightUpdateReqInput(selector=selector), None)
        # by CUDA IPC each of several schedulers would hold a context on the first one's device
        device = self._device if len(self.schedulers) == 1 else torch.device("cpu")
        sent: dict[str, list[str]] = {}
        for part in parts_of(ConvertedWeights(weights, self._dtype, device), PART_BYTES):
            named = [*part.items()]
            success, message, *_ = await manager.update_weights_from_tensor(
                UpdateWeightsFromTensorReqInput(
                    serialized_named_tensors=[serialize(named) for _ in self.schedulers],
                    selector=selector,
                    flush_cache=False,
                    weight_version=version,
                ),
                None,
            )
            if not success:
                raise RankError(f"SGLang refused the weights: {message}")
            if self._held is not None:
                sent |= self._checksums_of(drafter_as_held(part) if selector == "draft" else part)
            self._calls.note_progress()
        await manager.end_weight_update(EndWeightUpdateReqInput(), None)
        return sent

    def close(self) -> None:
        self._launched.close()
        if self._socket is not None:
            self._socket.close()

    async def verify(
        self, sent: Mapping[str, torch.Tensor], selector: _Runner, update: str
    ) -> None:
        """Raise RankError if SGLang holds other weights than these."""
        await self._compare(self._checksums_of(sent), selector, update)

    async def _compare(self, sent: Mapping[str, list[str]], selector: _Runner, update: str) -> None:
        if self._held is None:
            return
        before, held = self._held.get(selector, ()), await self._checksums(selector)
        found = compare(sent, before, held)
        if found.is_foreign and not self._hashes_agree:
            _log.warning("SGLang's weights cannot be verified", update=update)
            self._held = None
            return
        if found.wrong is not None:
            raise RankError(f"after {update} SGLang holds another {found.wrong}")
        self._hashes_agree = True
        self._held[selector] = held

    @property
    def _device(self) -> torch.device:
        """Return the device of the first scheduler."""
        settings = self._launched.engine.server_args
        on_cpu = settings.device == "cpu"
        return torch.device("cpu") if on_cpu else torch.device("cuda", settings.base_gpu_id)

    def _checksums_of(self, weights: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
        from sglang.srt.managers.mm_utils import tensor_hash

        device = self._device

        def checksum(tensor: torch.Tensor) -> str:
            # SGLang hashes by another function on a GPU than on a CPU
            return f"{tensor_hash(tensor.to(device)):016x}"

        return checksums_of(weights, len(self.schedulers), checksum, device.type == "cpu")

    async def _checksums(self, selector: _Runner) -> Checksums:
        """Return by rank the checksums of the weights that SGLang holds, by its names."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        success, message, ranks, _ = await self._manager.check_weights(
            CheckWeightsReqInput(action="checksum", selector=selector)
        )
        if not success or len(ranks or ()) != len(self.schedulers):
            raise RankError(f"SGLang cannot tell what weights it holds: {message}")
        # SGLang marks the names of a drafter's weights, and of no others
        return [
            {name.removeprefix("draft."): sum for name, sum in rank["checksums"].items()}
            for rank in ranks
        ]

    async def _while_alive(self, task: "asyncio.Task[_T]") -> _T:
        self._calls.note_progress()
        while not task.done():
            await asyncio.wait([task], timeout=min(1.0, self.stuck_seconds / 4))
            if (failure := self._launched.failure()) is not None:
                raise RankError(f"SGLang's scheduler {failure}")
            if not task.done():
                self.check(self._calls)
        return task.result()

    def check(self, watch: StuckWatch) -> None:
        """Raise RankError if a watch finds that SGLang is stuck."""
        if (complaint := watch.complaint()) is not None:
            raise RankError(f"SGLang {complaint}: {self._launched.last_lines()}")


def _sampling_params(request: Request, most: int) -> dict[str, Any]:
    sampling: Sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_new_tokens": min(request.max_new_tokens, most),
        # `ignore_eos` means that SGLang ignores all stop tokens
        "ignore_eos": not request.stop_tokens,
        "stop_token_ids": sorted(request.stop_tokens),
    }


def _part(output: dict[str, Any]) -> PartialAnswer:
    meta = output["meta_info"]
    return PartialAnswer(
        tokens=list(output["output_ids"]),
        logprobs=[entry[0] for entry in meta["output_token_logprobs"]],
        stop=_stop(meta["finish_reason"]),
        complaint=str((meta["finish_reason"] or {}).get("message", "")),
        # an answer that was given up while it waited has none
        retractions=meta.get("num_retractions", 0),
    )


def _stop(reason: dict[str, Any] | None) -> StopReason | None:
    if reason is None:
        return None
    kinds: dict[str, StopReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}
    return kinds[reason["type"]]
