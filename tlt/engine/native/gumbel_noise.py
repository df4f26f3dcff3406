"""Keyed Gumbel noise: a function of the key, the position and the token id, and of nothing else.

The token with the largest log-probability plus noise is an exact sample. So the same request gets
the same tokens in any batch, and a retry repeats them, as far as its logits are the same: on a CPU
in float32. Elsewhere rounding decides between tokens that nearly tie.
"""

import torch

from tlt.base.id_types import Purpose
from tlt.engine.base import NoiseKey
from tlt.engine.native.keyed_sampling_kernel import find_kernel

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1
_PURPOSES: dict[Purpose, int] = {"train": 1, "eval": 2}


def key_word(key: NoiseKey) -> int:
    """Hash the key to one signed 64-bit number."""
    word = 0
    branch = (key.branch,) if key.branch else ()
    for part in (key.seed, _PURPOSES[key.purpose], key.step, key.prompt, key.member, *branch):
        word = _mixed_word((word + part * _GOLDEN + _GOLDEN) & _WORD)
    return _signed(word)


class GumbelNoise:
    def __init__(self, vocabulary: int, device: torch.device, capacity: int = 0) -> None:
        """Reuse one buffer for up to `capacity` positions; the next call overwrites it."""
        self._block = block(device)
        self._tokens = torch.arange(1, vocabulary + 1, device=device) * _signed(_GOLDEN)
        self._buffer = torch.empty(capacity, vocabulary, device=device)

    @property
    def bytes(self) -> int:
        return self._buffer.nbytes + self._tokens.nbytes

    def gumbel(
        self, keys: torch.Tensor, positions: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [..., vocabulary] in float32 for keys and positions of one shape.

        Of `chosen` tokens alone it is [..., chosen].
        """
        tokens = self._tokens if chosen is None else self._tokens[chosen]
        draws = _mixed(keys + (positions + 1) * _signed(_GOLDEN))
        words, noise = draws.view(-1, 1), self._room(draws.numel(), len(tokens))
        if (kernel := find_kernel(noise)) is not None:
            kernel.fill_gumbel_noise(noise, draws.contiguous(), tokens)
        elif noise.numel() <= self._block:
            _fill(noise, words + tokens)
        else:
            self._fill_blocks(noise, words, tokens)
        return noise.view(*draws.shape, -1)

    def _room(self, draws: int, width: int) -> torch.Tensor:
        buffer = self._buffer
        fits = draws <= len(buffer) and width == buffer.shape[1]
        return buffer[:draws] if fits else buffer.new_empty(draws, width)

    def _fill_blocks(self, noise: torch.Tensor, words: torch.Tensor, tokens: torch.Tensor) -> None:
        rows = max(self._block // noise.shape[1], 1)
        for part, own in zip(noise.split(rows), words.split(rows), strict=True):
            blocks = part.split(self._block, dim=1), tokens.split(self._block)
            for target, block_tokens in zip(*blocks, strict=True):
                _fill(target, own + block_tokens)


def block(device: torch.device) -> int:
    """Return how many numbers are computed at once: on a CPU as many as fit its cache."""
    return 1 << 16 if device.type == "cpu" else 1 << 24


def _fill(target: torch.Tensor, words: torch.Tensor) -> None:
    bits = _mixed(words).bitwise_and_(2**63 - 1)
    # large noise comes from small uniform numbers, where floats are dense: log1p keeps the tail
    # that the log of a number near one would cut off at 2^-24
    negated = target.copy_(bits).mul_(-(2.0**-63)).clamp_(-(1 - 2.0**-24), -(2.0**-64))
    negated.log1p_().neg_().log_().neg_()


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Apply the finaliser of SplitMix64 in place."""
    words.bitwise_xor_((words >> 30).bitwise_and_(2**34 - 1)).mul_(_signed(_FIRST))
    words.bitwise_xor_((words >> 27).bitwise_and_(2**37 - 1)).mul_(_signed(_SECOND))
    return words.bitwise_xor_((words >> 31).bitwise_and_(2**33 - 1))


def _mixed_word(word: int) -> int:
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
