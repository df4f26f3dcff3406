"""Free the memory of a tensor for a while; views of it stay valid."""

import torch


def release_storage(tensor: torch.Tensor) -> None:
    """Free the memory; the tensor and its views must not be read or written meanwhile."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: torch.Tensor) -> None:
    """Allocate the memory again, filled with zeros; its address may be another."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    tensor.zero_()
