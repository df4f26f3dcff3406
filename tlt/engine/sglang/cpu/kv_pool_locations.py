"""Read and write spans of the table that holds the pool index of every token.

A span is the tokens from `starts[i]` up to `ends[i]` of the request in row `rows[i]`; the spans of
a batch are concatenated in a flat tensor.
"""

import torch


def assign_req_to_token_pool(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    indices: torch.Tensor,
    width: int,
) -> None:
    row, column = _spans(rows, starts, ends)
    table[row, column] = indices[: len(row)].to(table.dtype)


def assign_extend_cache_locs(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    indices: torch.Tensor,
    width: int,
) -> None:
    row, column = _spans(rows, starts, ends)
    indices[: len(row)] = table[row, column].to(indices.dtype)


def assign_draft_cache_locs_contiguous(
    rows: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    indices: torch.Tensor,
    width: int,
    topk: int,
    steps: int,
) -> None:
    assign_extend_cache_locs(rows, table, lengths, lengths + topk * steps, indices, width)


def build_draft_decode_metadata(
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    steps: int,
    width: int,
) -> torch.Tensor:
    """Return the rows of the table; in a chain, drafts follow the request's own tokens."""
    if topk != 1:
        raise NotImplementedError("draft trees (topk above 1) have no CPU stand-in")
    return table[rows]


def copy_all_layer_kv_cache(
    pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor
) -> None:
    """Do nothing: the accepted part of a chain needs no move. SGLang calls this as it starts."""
    if not torch.equal(targets, sources):
        raise NotImplementedError("draft trees (topk above 1) have no CPU stand-in")


def _spans(
    rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = (ends - starts).long()
    before = counts.cumsum(0) - counts
    offset = (starts - before).repeat_interleave(counts)
    return rows.long().repeat_interleave(counts), torch.arange(len(offset)) + offset
