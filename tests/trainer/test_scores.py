"""Scores of tokens are those of plain logits, and hold one tensor of a chunk's logits."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.live_tensor_bytes import LiveTensorBytes
from tlt.trainer.policy.model import logprobs
from tlt.trainer.policy.model.logprobs import score_tokens

TOKENS, HIDDEN, VOCABULARY = 21, 16, 40


class Inputs(NamedTuple):
    hidden: Tensor
    head: nn.Linear
    targets: Tensor
    temperature: Tensor

    def to(self, dtype: torch.dtype) -> "Inputs":
        head = nn.Linear(HIDDEN, VOCABULARY, "bias" in self.head.state_dict(), dtype=dtype)
        head.load_state_dict(self.head.state_dict())
        hidden = self.hidden.detach().to(dtype).requires_grad_()
        return Inputs(hidden, head, self.targets, self.temperature)


def inputs(bias: bool = False) -> Inputs:
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias)
    hidden = 3 * torch.randn(TOKENS, HIDDEN)
    # as exact in bfloat16 as in float64
    head.load_state_dict({n: (4 * w).bfloat16().float() for n, w in head.state_dict().items()})
    targets = torch.randint(VOCABULARY, (TOKENS,))
    temperature = torch.where(torch.arange(TOKENS) % 2 == 0, 1.0, 0.7)
    return Inputs(hidden.bfloat16().float(), head, targets, temperature)


def plain_scores(given: Inputs) -> tuple[Tensor, Tensor]:
    """Compute all logits at once, with torch's own gradients."""
    logits = given.head(given.hidden)
    distribution = (logits / given.temperature[:, None]).log_softmax(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return distribution.gather(-1, given.targets[:, None])[:, 0], entropy


def results(given: Inputs, scores: tuple[Tensor, Tensor], learn_entropy: bool) -> list[Tensor]:
    """Return scores and the gradients of a loss of them."""
    weights = torch.linspace(-1, 1, TOKENS)
    loss = (weights * scores[0]).sum()
    if learn_entropy:
        loss = loss + (weights.square() * scores[1]).sum()
    learned = [given.hidden, *given.head.parameters()]
    return [*(each.detach() for each in scores), *torch.autograd.grad(loss, learned)]


@pytest.mark.parametrize("chunk", [2**26, 7 * VOCABULARY, 1])
@pytest.mark.parametrize("learn_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_scores_and_gradients_are_those_of_plain_logits(
    monkeypatch: pytest.MonkeyPatch, chunk: int, learn_entropy: bool, bias: bool
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(logprobs, "BLOCK_LOGITS", 3 * VOCABULARY)
    for dtype, error in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        given = inputs(bias).to(dtype)
        ours = results(given, score_tokens(*given, learn_entropy), learn_entropy)
        theirs = results(given, plain_scores(given), learn_entropy)
        for found, expected in zip(ours, theirs, strict=True):
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found, expected, rtol=error, atol=error)


def test_in_bfloat16_scores_are_as_near_as_those_of_plain_logits() -> None:
    exact = inputs().to(torch.float64)
    expected = results(exact, plain_scores(exact), True)
    given = inputs().to(torch.bfloat16)
    ours = results(given, score_tokens(*given, True), True)
    theirs = results(given, plain_scores(given), True)
    for found, plain, truth in zip(ours, theirs, expected, strict=True):
        scale = truth.norm()
        assert (found - truth).norm() / scale < 1.2 * (plain - truth).norm() / scale + 1e-3


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    given = inputs().to(torch.float32)
    found, _ = score_tokens(*given)
    first, second = (
        torch.autograd.grad(found.sum(), given.hidden, retain_graph=True) for _ in range(2)
    )
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("learn_entropy", [False, True])
@pytest.mark.parametrize("parts", [1, 4])
def test_one_tensor_of_a_chunks_logits_is_alive(
    monkeypatch: pytest.MonkeyPatch, parts: int, learn_entropy: bool
) -> None:
    tokens, vocabulary = 64, 2000
    chunk = tokens * vocabulary // parts
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(logprobs, "BLOCK_LOGITS", 2 * vocabulary)
    head = nn.Linear(8, vocabulary, bias=False)
    hidden = torch.randn(tokens, 8, requires_grad=True)
    targets, temperature = torch.randint(vocabulary, (tokens,)), torch.ones(tokens)
    with LiveTensorBytes() as live:
        live.meet(head.weight)
        found, entropy = score_tokens(hidden, head, targets, temperature, learn_entropy)
        forward = live.peak
        (found + entropy).sum().backward()
    logits, weights = 4 * chunk, 4 * head.weight.numel()
    assert forward < weights + 1.2 * logits
    # the head's gradient and its product with a chunk, at most, beside the logits
    assert live.peak < 2 * weights + 1.3 * logits
