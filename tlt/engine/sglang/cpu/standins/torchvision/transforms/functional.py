class InterpolationMode:
    """A name that appears in signatures."""
