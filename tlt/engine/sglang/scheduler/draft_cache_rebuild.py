"""Fill the drafter's cache for requests that run, as if the drafter had been there from the start.

The states that the drafter reads are in the tap. Without this, a drafter that is adopted in
mid-answer would guess from the keys and values of another one, or of none.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

from tlt.engine.sglang.scheduler.step_plan import KnownText

# tokens that are computed at once, but never less than a request's
_MOST_TOKENS = 8192


def rebuild_draft_cache(
    worker: Any,
    batch: Any,
    texts: Sequence[KnownText],
    states_of: Callable[[str, int], torch.Tensor],
) -> None:
    """Compute the cache of rows of the batch, and what their next proposals begin with.

    `states_of` returns the states that the drafter reads at a request's first positions.
    """
    draft, spec = worker.draft_worker, batch.spec_info
    for part in _parts(texts):
        states = [states_of(batch.reqs[text.row].rid, len(text.tokens)) for text in part]
        logits = _extend(draft, batch, part, states)
        chosen = torch.tensor([text.row for text in part], device=batch.seq_lens.device)
        spec.topk_index[chosen] = logits.next_token_logits.argmax(-1, keepdim=True).to(
            spec.topk_index
        )
        spec.topk_p[chosen] = 1.0
        spec.hidden_states[chosen] = logits.hidden_states.to(spec.hidden_states)


def _extend(draft: Any, batch: Any, texts: Sequence[KnownText], states: list[torch.Tensor]) -> Any:
    """Run the drafter over whole texts; row i of a text reads the token after position i."""
    rows = [text.row for text in texts]
    lengths = [len(text.tokens) for text in texts]
    device = batch.seq_lens.device
    chosen = torch.tensor(rows, device=device)
    requests = [batch.reqs[row] for row in rows]
    slots = draft.req_to_token_pool.req_to_token
    pool = batch.req_pool_indices[chosen]
    tokens = [token for text in texts for token in text.tokens]
    part = copy(batch)
    part.reqs = requests
    part.forward_mode = ForwardMode.EXTEND
    part.input_ids = torch.tensor(tokens, dtype=torch.int64, device=device)
    part.req_pool_indices = pool
    part.seq_lens = batch.seq_lens[chosen]
    part.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
    part.seq_lens_sum = sum(lengths)
    part.orig_seq_lens = part.seq_lens.to(torch.int32)
    part.out_cache_loc = torch.cat(
        [slots[slot, :length] for slot, length in zip(pool.tolist(), lengths, strict=True)]
    ).to(torch.int64)
    part.prefix_lens = [0] * len(rows)
    part.extend_lens = lengths
    part.extend_num_tokens = sum(lengths)
    part.extend_logprob_start_lens = [0] * len(rows)
    part.return_logprob = False
    part.top_logprobs_nums = part.token_ids_logprobs = None
    part.sampling_info = None
    part.multimodal_inputs = [None] * len(rows)
    part.spec_info = EagleDraftExtendInput(
        hidden_states=torch.cat(states).to(device),
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
    )
    forward = ForwardBatch.init_new(
        part,
        draft.draft_runner,
        capture_hidden_mode=CaptureHiddenMode.LAST,
        return_hidden_states_before_norm=False,
    )
    forward.return_logprob = False
    return draft.draft_runner.forward(forward).logits_output


def _parts(texts: Sequence[KnownText]) -> list[list[KnownText]]:
    """Split texts so that each part has few tokens, or a single text."""
    parts: list[list[KnownText]] = []
    tokens = 0
    for text in texts:
        if not parts or tokens + len(text.tokens) > _MOST_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(text)
        tokens += len(text.tokens)
    return parts
