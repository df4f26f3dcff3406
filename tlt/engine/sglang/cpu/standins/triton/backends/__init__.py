"""Triton's devices, which torch.compile reads: there are none."""

backends: dict[str, object] = {}
