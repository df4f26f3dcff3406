"""Hooks in SGLang's scheduler process that copy hidden states into the tap.

They change nothing that SGLang computes. One environment variable configures them; an answer
without states in the tap is an error, so a plugin that didn't load is detected.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from tlt.engine.sglang.shared_hidden_state_buffer import Tap, TapShape, TapWriter

_VARIABLE = "TLT_SGLANG_PLUGIN"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    tap: str
    shape: TapShape
    # a file to which every proposal of the drafter is written, for tests and benchmarks
    proposals: str | None = None

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: msgspec.json.encode(self).decode()}


def install() -> None:
    """Register the hooks; call this in the scheduler's process before its scheduler exists."""
    if (text := os.environ.get(_VARIABLE)) is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    options = msgspec.json.decode(text, type=Options)
    hooks = _Hooks(options)
    for target, hook in (
        ("managers.tp_worker.TpModelWorker.forward_batch_generation", hooks.record_forward),
        ("speculative.eagle_worker_common.run_eagle_verify", hooks.record_verify),
        ("configs.model_config.ModelConfig.__init__", hooks.drop_model_stop_tokens),
        ("layers.logits_processor.LogitsProcessor.__init__", hooks.keep_last_state),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AFTER)
    if options.proposals is not None:
        HookRegistry.register(
            "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
            _ProposalWriter(Path(options.proposals)).record,
            HookType.AFTER,
        )
    HookRegistry.apply_hooks()


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    # tokens that the policy has processed
    seen: int
    # the token that it sampled then, and the drafter's proposal after it
    tokens: list[int]


class _ProposalWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def record(self, verify: Any, worker: Any, batch: Any, *_: Any, **__: Any) -> None:
        rows = verify.draft_token.view(len(batch.reqs), -1).tolist()
        for request, seen, tokens in zip(batch.reqs, batch.seq_lens.tolist(), rows, strict=True):
            proposal = Proposal(name=request.rid, seen=seen, tokens=tokens)
            self._file.write(msgspec.json.encode(proposal) + b"\n")


class _Hooks:
    """Hooks that are called with a function's result, then its arguments."""

    def __init__(self, options: Options) -> None:
        self._shape = options.shape
        self._tap = Tap(Path(options.tap), options.shape)
        self._writer = TapWriter(self._tap)

    def keep_last_state(self, _: None, processor: Any, *arguments: Any, **options: Any) -> None:
        """Keep the last state beside the captured layers, which replace it otherwise."""
        processor.keep_last_hidden_states = self._shape.layers > 1

    def drop_model_stop_tokens(self, _: None, config: Any, *arguments: Any, **options: Any) -> None:
        """Remove the model's stop tokens: only a request's own ones end it."""
        config.hf_eos_token_id = set()

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
        states = self._states(result.logits_output)
        if batch.forward_mode.is_extend():
            starts, counts = batch.prefix_lens, batch.extend_lens
        else:
            starts, counts = (batch.seq_lens - 1).tolist(), [1] * len(batch.reqs)
        offset = 0
        for request, start, count in zip(batch.reqs, starts, counts, strict=True):
            own = None if states is None else states[offset : offset + count]
            self._write(request, start, count, own, len(batch.reqs))
            offset += count

    def record_verify(self, result: Any, batch: Any, *arguments: Any, **options: Any) -> None:
        if not batch.reqs:
            return
        states = self._states(result.logits_output)
        drafted = result.speculative_num_draft_tokens
        accepted = result.accept_lens.tolist()
        rows = zip(batch.reqs, batch.seq_lens.tolist(), accepted, strict=True)
        for index, (request, start, count) in enumerate(rows):
            first = index * drafted
            own = None if states is None else states[first : first + count]
            self._write(request, start, count, own, len(batch.reqs))

    def _write(
        self, request: Any, start: int, count: int, states: torch.Tensor | None, running: int
    ) -> None:
        from sglang.srt.runtime_context import get_serving

        prompt, version = request.origin_input_ids, int(get_serving().weight_version)
        self._writer.write(request.rid, prompt, start, count, states, running, version)

    def _states(self, output: Any) -> torch.Tensor | None:
        """Return [tokens, layers, hidden]: the captured layers, then the last state."""
        if self._shape.layers == 0:
            return None
        states = output.hidden_states
        if output.last_hidden_states is not None:
            states = torch.cat([states, output.last_hidden_states], dim=-1)
        return states.view(len(states), self._shape.layers, self._shape.hidden)
