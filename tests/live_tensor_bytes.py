"""Count the bytes of all tensor storages that are alive, and remember the most at any moment."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensorBytes(TorchDispatchMode):
    """Watch every operation: a storage counts from when one first meets it until it is freed.

    What a kernel allocates and frees within itself isn't seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self._meet(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor from now on, as if an operation had read it."""
        self._meet(tensor.untyped_storage())

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata  # pyright: ignore[reportPrivateUsage]
        if key in self._known:
            return
        size = storage.nbytes()
        self.now += size
        self._known[key] = weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.now -= size
