"""torch.compile looks here for the devices that Triton compiles for: none."""

backends: dict[str, object] = {}
