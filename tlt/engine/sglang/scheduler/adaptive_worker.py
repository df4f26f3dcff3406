"""SGLang's EAGLE worker with TLT's choice of strategy, n-gram proposals and drafter versions.

The scheduler's process imports this, and `tests/sglang_contract.py` lists what it relies on. With
tensor parallelism every rank has one, and all compute a pass by the same plan.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from tlt.engine.sglang.scheduler.draft_cache_rebuild import rebuild_draft_cache
from tlt.engine.sglang.scheduler.hot_head import HotHead
from tlt.engine.sglang.scheduler.step_choice import FollowedChoice
from tlt.engine.sglang.scheduler.step_plan import StepPlan
from tlt.engine.sglang.shared.shared_hidden_state_buffer import RequestName, Tap


@dataclass(kw_only=True)
class WorkerParts:
    """Hold what the worker shares with the hooks of its process."""

    # returns the choice of a worker
    choose: "Callable[[AdaptiveWorker], FollowedChoice]"
    tap: Tap
    # layers that the drafter reads
    layers: int
    # folder of a drafter that proposes some tokens, which change, of the policy's; else None
    hot: Path | None


class AdaptiveWorker(EAGLEWorkerV2):
    parts: WorkerParts

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._choice = self.parts.choose(self)
        self._plan = StepPlan()
        # the n-grams of the present step
        self._chains: torch.Tensor | None = None
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
    def candidate_steps(self) -> tuple[int, ...]:
        """Return how many drafts the captured states can verify."""
        return tuple(self._controller.candidate_steps)

    @property
    def _draft(self) -> Any:
        """Return SGLang's draft worker, which every rank of ours has."""
        return self._draft_worker

    @property
    def _controller(self) -> Any:
        """Return SGLang's adaptive controller, which holds the captured states."""
        return self.adaptive_controller

    def init_cuda_graphs(self) -> None:
        if self.parts.hot is not None:
            policy = self.target_worker.model_runner.model
            self._hot_head = HotHead(self._draft, policy, get_tp_group(), self.parts.hot)
        super().init_cuda_graphs()

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        decodes = batch.forward_mode.is_decode() and not batch.is_extend_in_batch
        plan = self._plan = self._choice.begin(batch, decodes)
        if plan.rebuilt:
            rebuild_draft_cache(self, batch, plan.rebuilt, self._states_of)
        if plan.chains is not None:
            self._chains = torch.tensor(plan.chains, device=self.device)
        try:
            result = super().forward_batch_generation(
                batch, on_publish, grammar_barrier, pp_proxy_tensors
            )
        finally:
            self._chains = None
        self._choice.end()
        return result

    def activate_step_by_batch(self, batch_size: int) -> None:
        if self._plan.width != self.speculative_num_steps:
            self._controller._activate(self._plan.width)

    def verify(self, batch: Any, *arguments: Any, **options: Any) -> Any:
        result = super().verify(batch, *arguments, **options)
        self._choice.note_verified(batch, result)
        return result

    def on_verify_complete_cpu(
        self, num_correct_drafts_per_req: list[int], batch_size: int = 0
    ) -> None:
        self._choice.complete(num_correct_drafts_per_req)

    def handle_idle(self) -> None:
        self._choice.handle_idle()

    def _states_of(self, request: str, positions: int) -> torch.Tensor:
        """Return the states that the drafter reads at a request's first positions."""
        states = self.parts.tap.states[RequestName.read(request).slot, :positions]
        return states[:, : self.parts.layers].flatten(1)

    def _draft_or_look_up(self, batch: Any, **options: Any) -> Any:
        if self._chains is None:
            verify_input = self._propose(batch, **options)
        else:
            verify_input = self._verify_chains(batch, self._chains)
        self._choice.mark_proposed()
        return verify_input

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
        if not self._plan.extends:
            self._stub_skipped_draft_extend(batch, result)
            return
        with self._choice.timed_extension():
            self._extend(batch, result, **options)

    def _prefill_with_drafter(
        self, batch: Any, states: Any, next_token_ids: torch.Tensor, *rest: Any, **options: Any
    ) -> Any:
        if self._plan.extends:
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
