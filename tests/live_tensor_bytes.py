"""Count the bytes of all tensor storages that are alive, and remember the most at any moment."""

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensorBytes(TorchDispatchMode):
    """Watch every operation: a storage counts from when one first meets it until it is freed.

    What a kernel allocates and frees within itself isn't seen.
    """

    def __init__(self, resizing: bool = False) -> None:
        """Notice with `resizing` that storages grow and shrink, as FSDP2's do; that is slow."""
        super().__init__()
        self.now = 0
        self.peak = 0
        self._resizing = resizing
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor from now on, as if an operation had read it."""
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = own.untyped_storage()
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key not in self._sizes:
            self._storages[key] = weakref.ref(storage)
            self._set_size(key, storage.nbytes())
            weakref.finalize(storage, self._forget, key)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.meet(leaf)
        if self._resizing:
            for key, storage in list(self._storages.items()):
                if (alive := storage()) is not None:
                    self._set_size(key, alive.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _set_size(self, key: int, size: int) -> None:
        self.now += size - self._sizes.get(key, 0)
        self._sizes[key] = size

    def _forget(self, key: int) -> None:
        del self._storages[key]
        self.now -= self._sizes.pop(key)
