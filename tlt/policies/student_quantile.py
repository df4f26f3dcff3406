"""Student's t from the normal quantile, by the Cornish-Fisher expansion."""


def student_quantile(normal: float, degrees: float) -> float:
    """Return the quantile of t that belongs to a normal one; good from three degrees on."""
    z, n = normal, float(degrees)
    first = (z**3 + z) / 4.0
    second = (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    third = (3.0 * z**7 + 19.0 * z**5 + 17.0 * z**3 - 15.0 * z) / 384.0
    return z + first / n + second / n**2 + third / n**3
