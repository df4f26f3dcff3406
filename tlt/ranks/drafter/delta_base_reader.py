"""Read the weights that members' deltas are added to, and take the drafter out of them."""

from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt
from tlt.blobs.blob_files import Blobs
from tlt.errors import BlobError
from tlt.models.float32_product import wide
from tlt.models.safetensors_io import read_weights
from tlt.protocol.refs import DrafterBase
from tlt.trainer.drafter.delta_merging import BaseWeights

_WEIGHTS, _MEAN = "weights.", "mean."


class BaseReader:
    """Read bases, which stay on the host."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def read(
        self, ref: DrafterBase, root: BaseWeights | None, check: CheckInterrupt
    ) -> BaseWeights:
        """Return a base; `root` is this member's initial weights, for a base without a blob."""
        if ref.weights is None:
            if root is None:
                raise BlobError("no member has begun the lineage of this base")
            return root
        stored = read_weights(self._blobs, ref.weights, check)
        tensors = {name: _widened(tensor) for name, tensor in stored.items()}
        # bases of earlier versions lack it
        d2t = tensors.pop("d2t", None if root is None else root.d2t)
        if not any(name.startswith(_WEIGHTS) for name in tensors):
            # the lineage begins with an adopted drafter, whose weights serve as their running mean
            tensors = {part + name: t for name, t in tensors.items() for part in (_WEIGHTS, _MEAN)}
        return BaseWeights(
            tensors=tensors, updates=ref.updates, micro_batches=ref.micro_batches, d2t=d2t
        )


def _widened(tensor: Tensor) -> Tensor:
    """Return it in float32 at least: small deltas are added to it."""
    return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor


def mean_of(base: BaseWeights) -> dict[str, Tensor]:
    """Return the running mean of the weights, which is what engines propose with."""
    tensors = base.tensors.items()
    mean = {n.removeprefix(_MEAN): tensor for n, tensor in tensors if n.startswith(_MEAN)}
    return mean | tokens_of(base)


def tokens_of(base: BaseWeights) -> dict[str, Tensor]:
    """Return the tensor that says which tokens the drafter can propose, if it can't all."""
    return {} if base.d2t is None else {"d2t": base.d2t}
