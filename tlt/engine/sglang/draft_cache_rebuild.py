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

from tlt.engine.sglang.batch_ngrams import RunningText

# tokens that are computed at once, but never less than a request's
_MOST_TOKENS = 8192


def rebuild_draft_cache(
    worker: Any,
    batch: Any,
    texts: Sequence[RunningText],
    states_of: Callable[[str, int], torch.Tensor | None],
) -> bool:
    """Compute the cache of the batch's requests, and what the next proposals begin with.

    `texts` end with the token that the policy reads next, if that is known yet: return False if it
    isn't for all. `states_of` returns the states that the drafter reads at a request's first
    positions.
    """
    draft = worker.draft_worker
    spec = batch.spec_info
    lengths = batch.seq_lens.tolist()
    whole = [
        row
        for row, text in enumerate(texts)
        if len(text.prompt) + len(text.answer) == lengths[row] + 1
    ]
    states = {row: states_of(batch.reqs[row].rid, lengths[row]) for row in whole}
    for rows in _groups({row: lengths[row] for row, found in states.items() if found is not None}):
        known = [found for row in rows if (found := states[row]) is not None]
        logits = _extend(
            draft, batch, rows, [lengths[row] for row in rows], [texts[row] for row in rows], known
        )
        chosen = torch.tensor(rows, device=batch.seq_lens.device)
        spec.topk_index[chosen] = logits.next_token_logits.argmax(-1, keepdim=True).to(
            spec.topk_index
        )
        spec.topk_p[chosen] = 1.0
        spec.hidden_states[chosen] = logits.hidden_states.to(spec.hidden_states)
    return len(whole) == len(texts)


def _extend(
    draft: Any,
    batch: Any,
    rows: list[int],
    lengths: list[int],
    texts: list[RunningText],
    states: list[torch.Tensor],
) -> Any:
    """Run the drafter over whole texts; row i of a text reads the token after position i."""
    device = batch.seq_lens.device
    chosen = torch.tensor(rows, device=device)
    requests = [batch.reqs[row] for row in rows]
    slots = draft.req_to_token_pool.req_to_token
    pool = batch.req_pool_indices[chosen]
    tokens = [token for text in texts for token in [*text.prompt, *text.answer][1:]]
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


def _groups(lengths: dict[int, int]) -> list[list[int]]:
    """Split rows, of these lengths, so that each part has few tokens, or a single row."""
    groups: list[list[int]] = []
    tokens = 0
    for row, length in lengths.items():
        if not groups or tokens + length > _MOST_TOKENS:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += length
    return groups
