"""SGLang's EAGLE worker with TLT's choice of strategy, n-gram proposals and drafter versions.

The scheduler's process imports this, and `tests/sglang_contract.py` lists what it relies on. While
there is no drafter, or it hasn't been used for long, nothing of it is computed: its cache lapses,
and is rebuilt from the tap's states before it proposes again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

import torch
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt.engine.sglang.batch_ngrams import RunningText
from tlt.engine.sglang.batch_speculation import BatchSpeculation, LaunchedStep
from tlt.engine.sglang.draft_cache_rebuild import rebuild_draft_cache
from tlt.engine.sglang.frame_socket import FrameSocket
from tlt.engine.sglang.speculation_messages import (
    AllowSpeculation,
    FromScheduler,
    HooksInPlace,
    IndexAnswer,
    NotePolicySwap,
    TalliesTaken,
    ToScheduler,
    UseDrafter,
)
from tlt.engine.sglang.speculation_options import SpeculationOptions
from tlt.engine.sglang.tap_writer import StepKind, TapWriter
from tlt.id_types import NAMED
from tlt.strategies import Draft, Ngram

_SECONDS_BETWEEN_REPORTS = 0.25
# a choice without the drafter that holds for so many steps lets its cache lapse: keeping it costs
# more than rebuilding it
_LAPSE_STEPS = 32


@dataclass(kw_only=True)
class WorkerParts:
    """Hold what the worker shares with the hooks of its process."""

    options: SpeculationOptions
    speculation: BatchSpeculation
    socket: FrameSocket[FromScheduler, ToScheduler]
    # called with a batch, the result of its verify pass, and how that proposed
    record_verified: Callable[[Any, Any, StepKind], None]
    writer: TapWriter


class AdaptiveWorker(EAGLEWorkerV2):
    parts: WorkerParts

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._speculation = self.parts.speculation
        self._step: LaunchedStep | None = None
        # the n-grams of the present step, all of one length
        self._chains: torch.Tensor | None = None
        # True if the drafter's cache lacks positions of running requests
        self._lapsed = False
        if self.parts.options.trained:
            self._speculation.use_drafter(NAMED)
        self._reported = 0.0
        draft = self._draft
        self._propose, self._extend, self._prefill = (
            draft.draft,
            draft._draft_extend_for_decode,
            draft._draft_extend_for_prefill,
        )
        draft.draft = self._draft_or_look_up
        draft._draft_extend_for_decode = self._extend_with_drafter
        draft._draft_extend_for_prefill = self._prefill_with_drafter

    @property
    def _draft(self) -> Any:
        """Return SGLang's draft worker, which every rank of ours has."""
        return self._draft_worker

    @property
    def _controller(self) -> Any:
        """Return SGLang's adaptive controller, which holds the captured states."""
        return self.adaptive_controller

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        steps = tuple(self._controller.candidate_steps)
        self.parts.socket.send(HooksInPlace(steps=steps))

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        self.handle_messages()
        arguments = (batch, on_publish, grammar_barrier, pp_proxy_tensors)
        if not batch.forward_mode.is_decode() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(*arguments)
            self._speculation.interrupt()
            return result
        step = self._speculation.begin_step(list(batch.reqs), _context(batch))
        self._prepare(batch, step)
        self._step = step
        try:
            result = super().forward_batch_generation(*arguments)
        finally:
            self._step = self._chains = None
        self._speculation.launch(step)
        return result

    def _prepare(self, batch: Any, step: LaunchedStep) -> None:
        """Look n-grams up, or complete the drafter's cache, as the step's strategy needs."""
        choice = step.choice
        match choice.strategy:
            case Draft():
                if self._lapsed:
                    self.parts.writer.publish_staged()
                    texts = _texts(batch, self._speculation)
                    # with overlap a new request's first token may not be known yet
                    self._lapsed = not rebuild_draft_cache(self, batch, texts, self._states_of)
            case Ngram():
                self._look_up(batch, step, choice.strategy)
            case _:
                pass
        if not isinstance(choice.strategy, Draft) and choice.why != "control":
            self._lapsed = self._lapsed or choice.steps >= _LAPSE_STEPS

    def activate_step_by_batch(self, batch_size: int) -> None:
        assert self._step is not None
        if self._step.width != self.speculative_num_steps:
            self._controller._activate(self._step.width)

    def verify(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        step = self._step
        assert step is not None
        kind = StepKind(proposed=step.width > 0, drafter=step.drafter)
        result = super().verify(batch, *arguments, **options)
        self.parts.record_verified(batch, result, kind)
        step.tokens = partial(_gained_tokens, result)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self._speculation.complete(num_correct_drafts_per_req)
        now = monotonic()
        if now >= self._reported + _SECONDS_BETWEEN_REPORTS:
            self._reported = now
            self._report(idle=False)

    def handle_idle(self) -> None:
        """Report what is not reported yet, and read messages, while no request runs."""
        self.handle_messages()
        self._speculation.interrupt()
        self._report(idle=True)

    def handle_messages(self) -> None:
        for message in self.parts.socket.receive():
            match message:
                case UseDrafter(version=version):
                    self._speculation.use_drafter(version)
                    self._lapsed = True
                case NotePolicySwap():
                    self._speculation.handle_policy_swap()
                case IndexAnswer(prompt=prompt, tokens=tokens):
                    self._speculation.index_answer(prompt, tokens)
                case AllowSpeculation(allowed=allowed):
                    if self._speculation.allow(allowed):
                        self._lapsed = True

    def _report(self, idle: bool) -> None:
        if tallies := self._speculation.take_tallies(idle):
            self.parts.socket.send(TalliesTaken(tallies=tallies))
        else:
            self.parts.socket.flush()

    def _states_of(self, request: str, positions: int) -> torch.Tensor | None:
        """Return the states that the drafter reads at a request's first positions."""
        states = self.parts.writer.states_of(request, positions)
        return None if states is None else states[:, : self.parts.options.layers].flatten(1)

    def _draft_or_look_up(self, batch: Any, **options: Any) -> Any:
        assert self._step is not None
        if self._chains is None:
            verify_input = self._propose(batch, **options)
        else:
            verify_input = self._verify_chains(batch, self._chains)
        self._step.proposed = self._speculation.clock.mark()
        return verify_input

    def _look_up(self, batch: Any, step: LaunchedStep, strategy: Ngram) -> None:
        """Propose n-grams, in rows of one length that SGLang can verify."""
        texts = _texts(batch, self._speculation)
        proposals = self._speculation.propose_ngrams(texts, strategy.tokens)
        longest = max(map(len, proposals))
        if longest == 0:
            step.proposed = self._speculation.clock.mark()
            return
        candidates = self._controller.candidate_steps
        step.width = min(width for width in candidates if width >= longest)
        padded = [tokens + [0] * (step.width - len(tokens)) for tokens in proposals]
        self._chains = torch.tensor(padded, device=self.device)

    def _verify_chains(self, batch: Any, chains: torch.Tensor) -> EagleVerifyInput:
        draft, rows = self._draft, len(chains)
        return build_eagle_verify_input(
            batch,
            batch.spec_info,
            draft._topk1_parents_prealloc[:rows],
            draft._topk1_score_indices_prealloc[:rows],
            chains,
            None,
            target_worker=self.target_worker,
            topk=self.topk,
            num_steps=self.speculative_num_steps,
            num_draft_tokens=self.speculative_num_draft_tokens,
            tree_mask_mode=draft.tree_mask_mode,
            device=self.device,
        )

    def _extend_with_drafter(self, batch: Any, result: Any, **options: Any) -> None:
        """Keep the drafter's cache up to date, if there is a drafter that is used."""
        if self._speculation.drafter is None or self._lapsed:
            self._stub_skipped_draft_extend(batch, result)
            return
        assert self._step is not None
        began = self._speculation.clock.mark()
        self._extend(batch, result, **options)
        self._step.extended.append((began, self._speculation.clock.mark()))

    def _prefill_with_drafter(
        self, batch: Any, states: Any, next_token_ids: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        if self._speculation.drafter is not None and not self._lapsed:
            return self._prefill(batch, states, next_token_ids, *rest, **options)
        rows = len(next_token_ids)
        spec: Any = get_draft_recurrent_hidden_state_spec(self._draft.draft_runner)
        width, dtype = spec
        return EagleDraftInput(
            topk_p=torch.zeros(rows, 1, device=self.device),
            topk_index=torch.zeros(rows, 1, dtype=torch.int64, device=self.device),
            hidden_states=torch.zeros(rows, width, dtype=dtype, device=self.device),
            bonus_tokens=next_token_ids,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )


def _context(batch: Any) -> int:
    """Count the tokens of all requests, as far as the host knows them."""
    return sum(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)


def _gained_tokens(result: Any) -> Sequence[Sequence[int]]:
    """Return the tokens that each row of a verified batch gained; this waits for the device."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    rows = result.next_token_ids.view(len(result.accept_lens), -1).tolist()
    return [row[:gained] for row, gained in zip(rows, result.accept_lens.tolist(), strict=True)]


def _texts(batch: Any, speculation: BatchSpeculation) -> Sequence[RunningText]:
    """Return the texts up to the newest tokens, which may not have reached the host yet."""
    lengths = batch.seq_lens.tolist()
    return [
        RunningText(
            request.rid,
            request.origin_input_ids,
            speculation.answer_so_far(request, length + 1 - len(request.origin_input_ids)),
        )
        for request, length in zip(batch.reqs, lengths, strict=True)
    ]
