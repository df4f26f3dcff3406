"""The tracker counts each storage once, from its first operation until it is freed."""

import torch

from tests.live_tensor_bytes import LiveTensorBytes

KIB = 1024


def test_counts_live_storages_and_remembers_the_most() -> None:
    with LiveTensorBytes() as live:
        a = torch.zeros(KIB)
        view = a[: KIB // 2] + 0
        assert live.now == 4 * KIB + 2 * KIB
        del a
        assert (live.now, live.peak) == (2 * KIB, 6 * KIB)
        live.restart()
        assert live.peak == 2 * KIB
        view.mul_(2)
        assert live.now == 2 * KIB


def test_counts_what_autograd_stores() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    with LiveTensorBytes() as live:
        out = weight.exp().exp()
        # the inner result is the outer one's input, and kept by neither variable
        assert live.now == 3 * 4 * KIB
        out.sum().backward()
        del out
        assert weight.grad is not None
        assert live.now == 2 * 4 * KIB
