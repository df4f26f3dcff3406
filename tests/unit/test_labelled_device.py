"""The labelled device finds what would fail, or make the host wait, on a GPU."""

import inspect
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.labelled_device import CUDA, LabelledDevice, labelled_device


@pytest.fixture
def device() -> Iterator[LabelledDevice]:
    with labelled_device() as found:
        yield found


MIXES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add": lambda a, b: a + b,
    "write": lambda a, b: b.add_(a),
    "matmul": lambda a, b: a @ b,
    "join": lambda a, b: torch.cat([a, b]),
    "select": lambda a, b: a.index_select(0, b[0].long()),
    "gather": lambda a, b: a.gather(0, b.long()),
    "index of the device into the host's data": lambda a, b: b[a[0].long()],
    "linear": lambda a, b: F.linear(a, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "fill by a mask": lambda a, b: a.masked_fill(b > 0, 1.0),
    "out": lambda a, b: torch.mm(a, a, out=b),
}


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("inference", [False, True])
def test_refuses_a_mix_of_devices(device: LabelledDevice, name: str, inference: bool) -> None:
    a, b = torch.zeros(2, 2, device=CUDA), torch.zeros(2, 2)
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="the same device"):
        MIXES[name](a, b)


ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "number of the host": lambda a: a * torch.tensor(2.0) + 1,
    "threshold of the host": lambda a: torch.where(a > torch.tensor(0.5), a, torch.tensor(1.0)),
    "norm": lambda a: F.rms_norm(a, (4,), a[0]),
    "attention": lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None])[0],
    "steps in place": lambda a: a.clone().add_(1).mul_(a).view(-1).t(),
    "out": lambda a: torch.mm(a, a.t(), out=torch.empty(3, 3, device=CUDA)),
    "copies": lambda a: torch.empty_like(a).copy_(a).to(torch.float64),
    "like another": lambda a: a.new_tensor([1, 2]) + a.new_full((2,), 3),
    "index of the host": lambda a: a[torch.tensor([0, 2])],
}


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("inference", [False, True])
def test_computes_what_the_cpu_computes(device: LabelledDevice, name: str, inference: bool) -> None:
    source = torch.arange(12.0).view(3, 4)
    with torch.inference_mode(inference):
        found = ALLOWED[name](source.to(CUDA))
        assert (found.device, found.is_cuda) == (CUDA, True)
        expected = ALLOWED[name](source) if name != "out" else source @ source.t()
        torch.testing.assert_close(found.cpu(), expected)


def test_moves_no_tensor_that_is_there(device: LabelledDevice) -> None:
    a = torch.zeros(3, device=CUDA)
    assert a.to(CUDA) is a
    assert a.to("cuda:0", torch.float32) is a
    assert a.to(torch.zeros(1, device=CUDA)) is a
    assert a.to(CUDA, copy=True) is not a
    assert device.syncs == []


def test_gradients_stay_on_the_device(device: LabelledDevice) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    x = torch.randn(5, 3)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    layer.to(CUDA)
    layer(x.to(CUDA)).square().sum().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.device == CUDA
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda a: a[0].item(),
    "list": lambda a: a.tolist(),
    "cpu": lambda a: a.cpu(),
    "move": lambda a: a.to("cpu"),
    "copy": lambda a: torch.empty(3).copy_(a),
    "copy to memory that isn't pinned": lambda a: torch.empty(3).copy_(a, non_blocking=True),
    "truth": lambda a: bool(a[0] > 0),
    "number": lambda a: int(a.max()),
    "nonzero": lambda a: a.nonzero(),
    "mask": lambda a: a[a > 0],
    "repeat": lambda a: a.repeat_interleave(a.long()),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("inference", [False, True])
def test_records_where_the_host_waits_for_a_value(
    device: LabelledDevice, name: str, inference: bool
) -> None:
    with torch.inference_mode(inference):
        a = torch.arange(3.0, device=CUDA)
        assert device.syncs == []
        READS[name](a)
    (sync,) = device.syncs
    assert sync.kind == "read"
    at = inspect.getsourcelines(READS[name])[1]
    assert sync.line == f"tests/unit/test_labelled_device.py:{at}"


UPLOADS: dict[str, Callable[[Tensor], object]] = {
    "list": lambda a: torch.tensor([1, 2], device=CUDA),
    "list like another": lambda a: a.new_tensor([1, 2]),
    "move": lambda a: torch.zeros(3).to(a),
    "copy": lambda a: a.copy_(torch.zeros(3)),
    "index": lambda a: a[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("name", UPLOADS)
def test_records_where_the_host_waits_for_a_copy(device: LabelledDevice, name: str) -> None:
    UPLOADS[name](torch.zeros(3, device=CUDA))
    assert [sync.kind for sync in device.syncs] == ["upload"]


def test_records_explicit_waits(device: LabelledDevice) -> None:
    torch.cuda.synchronize()
    assert [sync.kind for sync in device.syncs] == ["wait"]


def test_other_work_is_no_sync(device: LabelledDevice) -> None:
    a = torch.ones(3, device=CUDA)
    mask = a > 0
    a[:1] = 2.0
    a[mask] = 1.0
    a.masked_fill_(mask, 0.0)
    host = torch.empty(3, pin_memory=True)
    host.copy_(a, non_blocking=True)
    a.copy_(host, non_blocking=True)
    assert a.shape == (3,)
    assert device.syncs == []


def test_leaves_the_process_as_it_was() -> None:
    with labelled_device():
        torch.zeros(1, device=CUDA)
    assert torch.zeros(1).device.type == "cpu"
    assert isinstance(torch.Generator(), torch.Generator)
