"""Pseudorandom choices that depend on their key alone (SplitMix64)."""

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 64-bit hash of a sequence of integers; the order matters."""
    state = 0x243F6A8885A308D3
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permuted(index: int, size: int, *key: int) -> int:
    """Return the position of `index` in the keyed permutation of range(size), without building it.

    A Feistel network of four rounds permutes the next power of four; results outside the range
    are permuted again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    position = index
    while True:
        left, right = position >> half, position & low
        for turn in range(4):
            left, right = right, left ^ (mix(*key, turn, right) & low)
        position = (left << half) | right
        if position < size:
            return position
