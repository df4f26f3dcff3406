"""A device without a GPU: tensors report `cuda:0` while their data lies on the CPU.

An operation that mixes devices raises as CUDA would. What makes the host wait for the device is
recorded with the line of our code that asked for it.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tests.host_syncs import (
    COPYING,
    INDEXING,
    HostSync,
    Kind,
    line_of_ours,
    mark_as_pinned,
    syncs_of,
)

CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
# what torch itself takes the device for: a backward pass on its `cuda` would need a GPU
_META = torch.device("meta")
_aten = torch.ops.aten

# operations that only CUDA has
_ON_CPU: dict[OpOverload, Callable[..., Tensor]] = {
    _aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype),
    _aten.mm.dtype_out: lambda a, b, dtype, out: torch.mm(a.to(dtype), b.to(dtype), out=out),
}


class LabelledTensor(torch.Tensor):
    """A tensor of `cuda:0`; `data_on_cpu` holds its numbers."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "LabelledTensor":
        # a normal tensor, because a view of a normal tensor can't be an inference tensor
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(
                cls,
                data.shape,
                strides=data.stride(),
                storage_offset=data.storage_offset(),
                dtype=data.dtype,
                device=_META,
            )
        made.data_on_cpu = data
        return made

    device = property(lambda _: CUDA)
    is_cuda = property(lambda _: True)
    is_meta = property(lambda _: False)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return itself if it has the device and the dtype already, as any tensor does."""
        return super().to(*map(_as_meta, args), **{n: _as_meta(a) for n, a in kwargs.items()})

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"LabelledTensor({self.data_on_cpu})"

    @classmethod
    def __torch_dispatch__(cls, func: OpOverload, *_: Any) -> Any:
        raise RuntimeError(f"{func} on a labelled tensor outside of `labelled_device`")


class LabelledDevice(TorchDispatchMode):
    """Compute on the CPU what is asked of `cuda:0`."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[HostSync] = []

    def count(self, *kinds: str) -> int:
        """Count the syncs of these kinds, or all of them."""
        return sum(not kinds or sync.kind in kinds for sync in self.syncs)

    def record(self, kind: Kind, operation: str) -> None:
        self.syncs.append(HostSync(kind, operation, line_of_ours()))

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        leaves = list(_leaves((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        labelled = any(isinstance(tensor, LabelledTensor) for tensor in tensors)
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if not labelled and (target is None or target.type == "cpu"):
            return _on_host(func, args, kwargs)
        if _is_composite(func):
            with self:  # inference mode passes composites undivided
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if func.overloadpacket is _aten._fused_sdp_choice:
            return 0  # plain operations, as the fused kernels differ by device
        _require_one_device(func, args, tensors)
        for kind, operation in syncs_of(func, args, kwargs, target):
            self.record(kind, operation)
        return self._compute(func, args, kwargs, target)

    def _compute(
        self, func: OpOverload, args: Any, kwargs: dict[str, Any], target: torch.device | None
    ) -> Any:
        if target is not None:
            kwargs["device"] = _CPU
        assert not kwargs.pop("pin_memory", None), "pinned memory belongs to the host"
        if func.overloadpacket is _aten._to_copy and target is not None:
            # data on another device never shares memory
            made = func(_unwrapped(args[0]), **kwargs)
            if made.data_ptr() == _unwrapped(args[0]).data_ptr():
                made = made.clone()
            return made if target.type == "cpu" else LabelledTensor(made)
        result = _ON_CPU.get(func, func)(*_unwrapped(args), **_unwrapped(kwargs))
        written = _written(func, args, kwargs)
        if not written:
            return _wrapped(result)
        for tensor in written:
            assert _unwrapped(tensor).shape == tensor.shape, f"{func} changed a shape"
        returned = len(func._schema.returns)
        return None if returned == 0 else written[0] if returned == 1 else tuple(written)


def _on_host(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute on the CPU, where memory is only said to be pinned."""
    pinned = kwargs.get("pin_memory")
    if not pinned:
        return func(*args, **kwargs)
    made = func(*args, **{**kwargs, "pin_memory": False})
    mark_as_pinned(made)
    return made


@cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _require_one_device(func: OpOverload, args: Any, tensors: Sequence[Tensor]) -> None:
    """Raise where CUDA would, which takes single numbers of the host in pointwise operations."""
    foreign = [tensor for tensor in tensors if not isinstance(tensor, LabelledTensor)]
    if func.overloadpacket in COPYING:
        return
    if func.overloadpacket in INDEXING and isinstance(args[0], LabelledTensor):
        indices = {id(index) for index in args[1]}
        foreign = [t for t in foreign if id(t) not in indices and t.dim() > 0]
    elif torch.Tag.pointwise in func.tags or func.overloadpacket is _aten.masked_fill_:
        written = {id(tensor) for tensor in _written(func, args, {})}
        foreign = [t for t in foreign if t.dim() > 0 or id(t) in written]
    if foreign and len(foreign) < len(tensors):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"cuda:0 and cpu! ({func} in {line_of_ours()})"
        )


def _written(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that the operation writes to and returns."""
    found: list[Tensor] = []
    for at, name in _written_names(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        found += [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
    return found


@cache
def _written_names(func: OpOverload) -> list[tuple[int, str]]:
    infos = [(at, a.name, a.alias_info) for at, a in enumerate(func._schema.arguments)]
    return [(at, name) for at, name, info in infos if info is not None and info.is_write]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([_map(change, part) for part in value])
    if isinstance(value, dict):
        return {name: _map(change, part) for name, part in value.items()}
    return change(value)


def _unwrapped(value: Any) -> Any:
    return _map(lambda leaf: leaf.data_on_cpu if type(leaf) is LabelledTensor else leaf, value)


def _wrapped(value: Any) -> Any:
    return _map(lambda leaf: LabelledTensor(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _as_meta(value: Any) -> Any:
    if isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
        return _META if torch.device(value).type == "cuda" else value
    return value


class _Event:
    """A CUDA event on a device that is never behind."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@contextmanager
def labelled_device() -> Generator[LabelledDevice]:
    """Let tensors be on `cuda:0` meanwhile; a tensor of that device is of no use afterwards."""
    device = LabelledDevice()
    lifts = torch._C._only_lift_cpu_tensors()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch._C._set_only_lift_cpu_tensors(True)
    # otherwise a module that moves keeps its tensors, which can't become labelled
    torch.__future__.set_swap_module_params_on_conversion(True)

    def wait(*_: Any) -> None:
        device.record("wait", "synchronize")

    patches: list[tuple[Any, str, Callable[..., Any] | type]] = [
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", lambda _: None),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40)),
        (torch.cuda, "synchronize", wait),
        (torch.accelerator, "synchronize", wait),
    ]
    active = [patch.object(*each) for each in patches]
    try:
        for each in active:
            each.start()
        with device:
            yield device
    finally:
        for each in active:
            each.stop()
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        torch._C._set_only_lift_cpu_tensors(lifts)
