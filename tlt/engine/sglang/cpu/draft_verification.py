"""Lay out one chain of drafts per request, and verify how much of it the target accepts.

Row i of a batch holds the last sampled token and then its drafts. All drafts before the first
rejected one are accepted; one token of the target's follows them. Top-k and top-p are applied to
the target's probabilities first. The names of keyword arguments are SGLang's.
"""

import torch

_QUERIES_ONLY = 1


def build_tree_kernel_efficient(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    count: int,
    mask_mode: int,
) -> None:
    if topk != 1 or mask_mode != _QUERIES_ONLY:
        raise NotImplementedError("draft trees (topk above 1) have no CPU stand-in")
    requests = len(lengths)
    chain = torch.arange(count)
    mask.view(requests, count, count).copy_(torch.ones(count, count, dtype=torch.bool).tril())
    positions.view(requests, count).copy_(lengths[:, None] + chain)
    index.copy_(torch.arange(requests * count).view(requests, count))
    next_token.copy_(torch.where(chain == count - 1, -1, chain + 1).expand(requests, count))
    next_sibling.fill_(-1)


def verify_tree_greedy(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **links: torch.Tensor,
) -> None:
    """Accept a draft if it is the target's most likely token."""
    agree = candidates[:, 1:] == target_predict[:, :-1]
    _commit(agree, target_predict, predicts, accept_index, accept_token_num)


def tree_speculative_sampling_target_only(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    **others: torch.Tensor | bool,
) -> None:
    """Accept a draft with the probability that the target gives it, and replace a rejected one by
    another token of the target's, so that all tokens follow its distribution."""
    if threshold_single != 1.0 or threshold_acc != 1.0:
        raise NotImplementedError("lossy acceptance (speculative thresholds) has no CPU stand-in")
    drafts = candidates[:, 1:].long()
    chances = target_probs[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    # not `<=`: both numbers may be zero
    agree = uniform_samples[:, : drafts.shape[1]] < chances
    ended = agree.long().cumprod(1).sum(1)
    requests = torch.arange(len(candidates))
    rest = target_probs[requests, ended].double()
    rejected = (ended < drafts.shape[1]).nonzero()[:, 0]
    rest[rejected, drafts[rejected, ended[rejected]]] = 0.0
    heaped = rest.cumsum(1)
    aim = uniform_samples_for_final_sampling.double()[:, None] * heaped[:, -1:]
    drawn = torch.searchsorted(heaped, aim, right=True)[:, 0].clamp(max=rest.shape[1] - 1)
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    tokens[requests, ended] = drawn
    _commit(agree, tokens, predicts, accept_index, accept_token_num)


def top_k_renorm_prob(probabilities: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the k largest, and all that tie with the last of them; the sum stays one."""
    falling = probabilities.sort(dim=-1, descending=True).values
    last = k.view(-1, 1).long().clamp(1, probabilities.shape[-1]) - 1
    return _normalise(probabilities.masked_fill(probabilities < falling.gather(1, last), 0.0))


def top_p_renorm_prob(probabilities: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest tokens that together reach p; the sum stays one."""
    falling, order = probabilities.sort(dim=-1, descending=True)
    beyond = falling.cumsum(-1) - falling >= p.view(-1, 1)
    beyond[:, 0] = False
    kept = falling.masked_fill(beyond, 0.0)
    return _normalise(torch.zeros_like(probabilities).scatter_(1, order, kept))


def fill_bonus_tokens(
    accepted: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """Write the last accepted token of each request."""
    last = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus.copy_(accepted.flatten()[last])


def _commit(
    agree: torch.Tensor,
    tokens: torch.Tensor,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_count: torch.Tensor,
) -> None:
    """Commit `tokens` up to and including the first position where draft and target differ."""
    requests, count = tokens.shape
    accepted = agree.long().cumprod(1).sum(1)
    committed = torch.arange(count) <= accepted[:, None]
    flat = torch.arange(requests * count).view(requests, count)
    predicts.view(requests, count)[committed] = tokens[committed].to(predicts.dtype)
    accept_index.copy_(torch.where(committed, flat, -1)[:, : accept_index.shape[1]])
    accept_count.copy_(accepted)


def _normalise(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)
