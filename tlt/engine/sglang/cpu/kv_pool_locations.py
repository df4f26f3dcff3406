"""Where tokens lie in the pool: spans of the table's rows, read and written.

A span is the tokens from `starts[i]` up to `ends[i]` of the request in row `rows[i]`; the spans of
a batch stand one behind the other in a flat tensor.
"""

import torch


def assign_req_to_token_pool(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    row, column = _spans(rows, starts, ends)
    table[row, column] = places[: len(row)].to(table.dtype)


def assign_extend_cache_locs(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    row, column = _spans(rows, starts, ends)
    places[: len(row)] = table[row, column].to(places.dtype)


def assign_draft_cache_locs_contiguous(
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    places: torch.Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    assign_extend_cache_locs(rows, table, lengths, lengths + topk * steps, places, width)


def build_draft_decode_metadata(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    steps: int,
    width: int,
) -> torch.Tensor:
    """The table as the drafter sees it. In a chain a draft's places follow the request's own."""
    if topk != 1:
        raise NotImplementedError("draft trees (topk above 1) have no CPU stand-in")
    return table[rows]


def copy_all_layer_kv_cache(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """The accepted part of a chain lies where it should; SGLang tries this out as it starts."""
    if not torch.equal(targets, sources):
        raise NotImplementedError("draft trees (topk above 1) have no CPU stand-in")


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = (ends - starts).long()
    before = counts.cumsum(0) - counts
    offset = (starts - before).repeat_interleave(counts)
    return rows.long().repeat_interleave(counts), torch.arange(len(offset)) + offset
