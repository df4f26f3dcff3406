"""Attention over a pool of keys and values that holds every request's tokens scattered.

`table[row, i]` is the pool index of token i of the request in that row. The order of the arguments
is that of the kernels in `sgl_kernel`; arguments that only other models need must be absent.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

# extends of at most this many tokens are computed as one batch if they are equally long
_SHORT = 32


def decode_attention(
    queries: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    key_scale: float,
    value_scale: float,
    output: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    indices: torch.Tensor,
    scratch: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
    cap: float,
    cross: bool,
    window: int,
    encoder_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attend with one query per request, whose own key and value are stored first."""
    _refuse(cap, cross, window, sinks)
    if keys is not None and values is not None:
        key_pool[indices] = keys.view(-1, *key_pool.shape[1:])
        value_pool[indices] = values.view(-1, *value_pool.shape[1:])
    _batched(queries, 1, key_pool, value_pool, output, table, rows, lengths, scaling)


def extend_attention(
    queries: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    output: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    key_scale: float,
    value_scale: float,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    extends: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float,
    cap: float,
    cross: bool,
    window: int,
    encoder_lengths: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    causal: bool,
) -> None:
    """Attend with the last `extends[i]` tokens of each request, which are in the pool."""
    _refuse(cap, cross, window, sinks)
    if tree_mask is not None or not causal:
        raise NotImplementedError("attention over draft trees has no CPU stand-in")
    counts = extends.tolist()
    if len(set(counts)) == 1 and counts[0] <= _SHORT:
        _batched(queries, counts[0], key_pool, value_pool, output, table, rows, lengths, scaling)
        return
    for row, length, count, start in zip(
        rows.tolist(), lengths.tolist(), counts, starts.tolist(), strict=True
    ):
        indices = table[row, :length]
        own = slice(start, start + count)
        result = scaled_dot_product_attention(
            queries[own].transpose(0, 1),
            key_pool[indices].transpose(0, 1),
            value_pool[indices].transpose(0, 1),
            attn_mask=torch.ones(count, length, dtype=torch.bool).tril(length - count),
            scale=scaling,
            enable_gqa=True,
        )
        output[own] = result.transpose(0, 1)


def _batched(
    queries: torch.Tensor,
    count: int,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    output: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> None:
    """Attend with the last `count` tokens of every request; shorter requests are padded.

    Query heads that share a key head become rows of one query, which saves copies of the keys.
    """
    requests, longest = len(lengths), int(lengths.max())
    heads, width = key_pool.shape[1], queries.shape[2]
    share = queries.shape[1] // heads
    last = lengths[:, None] - count + torch.arange(count)
    visible = torch.arange(longest) <= last[:, :, None]
    indices = table[:, :longest].index_select(0, rows)
    # the table is undefined beyond a request's end
    indices = indices.masked_fill(~visible[:, -1], 0).flatten()
    shape = requests, longest, heads, -1
    mask = visible[:, None].expand(requests, share, count, longest)
    result = scaled_dot_product_attention(
        queries.view(requests, count, heads, share, width)
        .permute(0, 2, 3, 1, 4)
        .reshape(requests, heads, share * count, width),
        key_pool.index_select(0, indices).view(shape).transpose(1, 2),
        value_pool.index_select(0, indices).view(shape).transpose(1, 2),
        attn_mask=mask.reshape(requests, 1, share * count, longest),
        scale=scaling,
    )
    result = result.view(requests, heads, share, count, -1).permute(0, 3, 1, 2, 4)
    output.copy_(result.reshape(output.shape))


def _refuse(cap: float, cross: bool, window: int, sinks: torch.Tensor | None) -> None:
    if cap > 0 or cross or window > 0 or sinks is not None:
        raise NotImplementedError(
            "attention with caps, windows, sinks or an encoder has no CPU stand-in"
        )
