class InterpolationMode:
    """Named in signatures."""
