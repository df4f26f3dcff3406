"""Hooks in SGLang's scheduler process: the tap, and the worker that chooses strategies.

The tap changes nothing that SGLang computes. One environment variable configures the hooks. SGLang
only logs that a hook didn't apply; here that ends the process, and each one answers with what is in
force in it when it is ready.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from tlt.engine.sglang.scheduler.speculation_controller import BatchSpeculation, StepClock
from tlt.engine.sglang.scheduler.step_choice import FollowedChoice, OwnChoice
from tlt.engine.sglang.scheduler.step_plan import PlanSharing
from tlt.engine.sglang.scheduler.tap_writer import Pass, StepKind, TapWriter
from tlt.engine.sglang.shared.scheduler_options import HooksInForce, Proposal, SchedulerOptions
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap
from tlt.engine.sglang.shared.speculation_messages import ControlPort

_Hook = Callable[..., Any]
_PACKAGE = "sglang.srt"
_SCHEDULER = "managers.scheduler.Scheduler"
_UPDATER = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def install(options: SchedulerOptions, connect: Callable[[], ControlPort]) -> None:
    """Register the hooks, before the process's scheduler exists.

    `connect` is called by the first scheduler of a tensor-parallel group, if it speculates.
    """
    hooks = _Hooks(options, connect)
    after: dict[str, _Hook] = {
        "managers.tp_worker.TpModelWorker.forward_batch_generation": hooks.record_forward,
        "configs.model_config.ModelConfig.__init__": hooks.drop_model_stop_tokens,
        "layers.logits_processor.LogitsProcessor.__init__": hooks.keep_last_state,
        "speculative.spec_info.SpeculativeAlgorithm.create_worker": hooks.choose_worker,
        f"{_SCHEDULER}.get_init_info": hooks.answer,
    }
    if options.proposals is not None:
        writer = _ProposalWriter(Path(options.proposals))
        after["speculative.eagle_worker_v2.EagleDraftWorker.draft"] = writer.record
    before: dict[str, _Hook] = {
        f"{_SCHEDULER}.process_batch_result": hooks.publish,
        f"{_SCHEDULER}.on_idle": hooks.handle_idle,
        f"{_UPDATER}.begin_weight_update": partial(_finish_passes, options.device),
    }
    _apply(before, after)


def _apply(
    before: Mapping[str, Callable[..., Any]], after: Mapping[str, Callable[..., Any]]
) -> None:
    """Hook functions of SGLang by their names, or raise RuntimeError naming one that isn't."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plain = {name: _find(name) for name in (*before, *after)}
    for hooks, kind in ((before, HookType.BEFORE), (after, HookType.AFTER)):
        for name, hook in hooks.items():
            HookRegistry.register(f"{_PACKAGE}.{name}", hook, kind)
    HookRegistry.apply_hooks()
    for name, function in plain.items():
        if _find(name) is function:
            raise RuntimeError(f"SGLang did not apply TLT's hook to {name}")


def _find(name: str) -> Any:
    try:
        return pkgutil.resolve_name(f"{_PACKAGE}.{name}")
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"SGLang has no {name}, which TLT hooks: {error}") from error


class _ProposalWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def record(self, verify: Any, worker: Any, batch: Any, *_: Any, **__: Any) -> None:
        if not _is_first_rank():
            return
        rows = verify.draft_token.view(len(batch.reqs), -1).tolist()
        for request, seen, tokens in zip(batch.reqs, batch.seq_lens.tolist(), rows, strict=True):
            proposal = Proposal(name=request.rid, seen=seen, tokens=tokens)
            self._file.write(msgspec.json.encode(proposal) + b"\n")


class _Hooks:
    """Hooks that are called with a function's result, if it is over, then its arguments."""

    def __init__(self, options: SchedulerOptions, connect: Callable[[], ControlPort]) -> None:
        self._options = options
        self._connect = connect
        self._shape = options.shape
        self._tap = Tap(Path(options.tap), options.shape)
        self._writer = TapWriter(self._tap)

    def keep_last_state(self, _: None, processor: Any, *arguments: Any, **options: Any) -> None:
        """Keep the last state beside the captured layers, which replace it otherwise."""
        processor.keep_last_hidden_states = self._shape.layers > 1

    def drop_model_stop_tokens(self, _: None, config: Any, *arguments: Any, **options: Any) -> None:
        """Remove the model's stop tokens: only a request's own ones end it."""
        config.hf_eos_token_id = set()

    def choose_worker(self, chosen: type, *arguments: Any, **options: Any) -> type:
        """Replace SGLang's EAGLE worker by ours."""
        speculation = self._options.speculation
        if speculation is None:
            return chosen
        from tlt.engine.sglang.scheduler.adaptive_worker import (
            AdaptiveWorker,
            EAGLEWorkerV2,
            WorkerParts,
        )

        if chosen is not EAGLEWorkerV2:
            return chosen
        shared = WorkerParts(
            choose=self._choose,
            tap=self._tap,
            layers=speculation.layers,
            hot=Path(speculation.drafter) if speculation.hot else None,
        )

        class Worker(AdaptiveWorker):
            parts = shared

        return Worker

    def _choose(self, worker: Any) -> FollowedChoice:
        """Return the choice of this rank's worker."""
        from sglang.srt.distributed import get_tp_group

        speculation, group = self._options.speculation, get_tp_group()
        assert speculation is not None
        sharing = PlanSharing(group)
        if group.rank_in_group != 0:
            return FollowedChoice(sharing)
        clock = StepClock(torch.device(self._options.device))
        return OwnChoice(
            BatchSpeculation(speculation, clock),
            self._connect(),
            sharing,
            self._writer,
            self.record_verified,
            lambda: worker.candidate_steps,
            speculation.trained,
        )

    def answer(self, said: dict[str, Any], scheduler: Any) -> dict[str, Any]:
        """Add what is in force to what the scheduler says when it is ready."""
        return HooksInForce(
            steps=getattr(scheduler.model_worker, "candidate_steps", ()),
            stop_tokens=tuple(sorted(scheduler.model_config.hf_eos_token_id or ())),
        ).add_to(said)

    def handle_idle(self, scheduler: Any) -> None:
        worker = scheduler.model_worker
        if hasattr(worker, "handle_idle"):
            worker.handle_idle()

    def publish(self, *arguments: Any, **options: Any) -> None:
        self._writer.publish_oldest()

    def record_forward(
        self,
        result: Any,
        worker: Any,
        batch: Any = None,
        *arguments: Any,
        is_verify: bool = False,
        **options: Any,
    ) -> None:
        if batch is None or is_verify or worker.is_draft_worker or not batch.reqs:
            return
        texts = None
        if batch.forward_mode.is_extend():
            starts, counts = list(batch.prefix_lens), list(batch.extend_lens)
            texts = [len(each.origin_input_ids) + len(each.output_ids) for each in batch.reqs]
        else:
            starts, counts = batch.seq_lens - 1, [1] * len(batch.reqs)
        self._record(batch, starts, counts, None, result, StepKind(), texts)

    def record_verified(self, batch: Any, result: Any, kind: StepKind) -> None:
        """Record what a verify pass accepted."""
        stride = result.speculative_num_draft_tokens
        self._record(batch, batch.seq_lens, result.accept_lens, stride, result, kind)

    def _record(
        self,
        batch: Any,
        starts: Any,
        counts: Any,
        stride: int | None,
        result: Any,
        kind: StepKind,
        texts: Sequence[int] | None = None,
    ) -> None:
        from sglang.srt.runtime_context import get_serving

        if not batch.reqs or not _is_first_rank():
            return
        self._writer.stage(
            Pass(
                requests=list(batch.reqs),
                starts=starts,
                counts=counts,
                stride=stride,
                states=self._states(result.logits_output),
                tokens=result.next_token_ids,
                version=int(get_serving().weight_version),
                kind=kind,
                texts=texts,
            )
        )

    def _states(self, output: Any) -> torch.Tensor | None:
        """Return [tokens, layers, hidden]: the captured layers, then the last state."""
        if self._shape.layers == 0:
            return None
        states = output.hidden_states
        if output.last_hidden_states is not None:
            states = torch.cat([states, output.last_hidden_states], dim=-1)
        return states.view(len(states), self._shape.layers, self._shape.hidden)


def _finish_passes(device: str, *_: Any, **__: Any) -> None:
    """Wait until no pass reads weights that are about to change.

    A pause only keeps the next pass from being launched. On a CPU each one is over by then, so that
    only a GPU shows passes that read mixed weights.
    """
    torch.get_device_module(device).synchronize()


def _is_first_rank() -> bool:
    """Return True in one rank of a tensor-parallel group: all compute the same states."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank == 0
