"""Noise and tokens by the C kernel are those by torch, in any batch and for any vocabulary."""

import pytest
import torch

from tests.engine.compiled import INSTRUCTION_SETS, built
from tests.engine.reference import new_request
from tlt.engine.base import Sampling
from tlt.engine.native import gumbel_noise, keyed_sampling_kernel
from tlt.engine.native.gumbel_noise import GumbelNoise
from tlt.engine.native.keyed_sampling_kernel import SamplingKernel, find_kernel
from tlt.engine.native.token_sampler import Sampler

_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def kernel(request: pytest.FixtureRequest) -> SamplingKernel:
    kernel = keyed_sampling_kernel.kernel
    return built(kernel, kernel.__wrapped__, request.param)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def unmixed(word: int) -> int:
    """Return what the finaliser of SplitMix64 maps to `word`."""

    def unshifted(x: int, by: int) -> int:
        y = x
        for _ in range(64 // by):
            y = x ^ (y >> by)
        return y

    modulus = 2**64
    word = unshifted(word, 31) * pow(0x94D049BB133111EB, -1, modulus) % modulus
    word = unshifted(word, 27) * pow(0xBF58476D1CE4E5B9, -1, modulus) % modulus
    word = unshifted(word, 30)
    return word - modulus if word >= 2**63 else word


@pytest.mark.parametrize("vocabulary", [1, 15, 32, 97, 5000])
def test_noise_is_that_of_torch(
    kernel: SamplingKernel, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, positions = torch.arange(7) * 2**55, torch.arange(7)
    monkeypatch.setattr(gumbel_noise, "find_kernel", lambda _: None)
    right = GumbelNoise(vocabulary, _CPU).gumbel(keys, positions)
    monkeypatch.setattr(gumbel_noise, "find_kernel", lambda _: kernel)
    noise = GumbelNoise(vocabulary, _CPU, 8)
    torch.testing.assert_close(noise.gumbel(keys, positions), right, rtol=1e-5, atol=1e-6)
    some = torch.arange(0, vocabulary, 3)
    torch.testing.assert_close(
        noise.gumbel(keys, positions, some), right[:, some], rtol=1e-5, atol=1e-6
    )


def test_noise_is_exact_for_the_smallest_and_the_largest_numbers(kernel: SamplingKernel) -> None:
    drawn_bits = [0, 1, 2**20, 2**39, 2**50, 2**62, 2**63 - 2**38, 2**63 - 1]
    words = torch.tensor([unmixed(bits) for bits in drawn_bits])
    noise = torch.empty(len(words), 1)
    kernel.fill_gumbel_noise(noise, words, torch.zeros(1, dtype=torch.int64))
    numbers = torch.tensor(drawn_bits).double().mul(2.0**-63).clamp(2.0**-64, 1 - 2.0**-24)
    right = -torch.log(-torch.log1p(-numbers))
    torch.testing.assert_close(noise[:, 0].double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 16, 97, 3000])
@pytest.mark.parametrize("noisy", [True, False])
def test_draws_the_tokens_and_logprobs_of_torch(
    kernel: SamplingKernel, vocabulary: int, noisy: bool
) -> None:
    logits, noise = 4 * drawn(5, 3, vocabulary), drawn(5, 3, vocabulary) if noisy else None
    divisors = torch.tensor([1.0, 0.25, 2.0, 1.0, 3.0])[:, None, None]
    scaled = logits / divisors
    best = (scaled if noise is None else scaled + noise).argmax(-1)
    right = scaled.double().log_softmax(-1).gather(-1, best[..., None])[..., 0]
    tokens, logprobs = kernel.draw(logits, noise, divisors)
    assert torch.equal(tokens, best)
    torch.testing.assert_close(logprobs.double(), right, rtol=1e-5, atol=1e-5)
    tokens, none = kernel.draw(logits, noise, divisors, with_logprobs=False)
    assert torch.equal(tokens, best)
    assert not len(none)


def test_draws_the_first_of_equal_tokens(kernel: SamplingKernel) -> None:
    logits = torch.zeros(1, 1, 100)
    logits[0, 0, [17, 33, 50, 99]] = 1.0
    assert kernel.draw(logits, None, None)[0].item() == 17


def test_a_row_does_not_depend_on_the_others(kernel: SamplingKernel) -> None:
    logits, noise = drawn(6, 2, 777), drawn(6, 2, 777)
    tokens, logprobs = kernel.draw(logits, noise, None)
    for row in range(6):
        own = kernel.draw(logits[row : row + 1, :1], noise[row : row + 1, :1], None)
        assert torch.equal(own[0][0], tokens[row, :1])
        assert torch.equal(own[1][0], logprobs[row, :1])


def test_logprobs_show_that_logits_are_not_numbers(kernel: SamplingKernel) -> None:
    logits = drawn(2, 1, 50)
    logits[0, 0, 3] = torch.nan
    tokens, logprobs = kernel.draw(logits, drawn(2, 1, 50), None)
    assert logprobs[:, 0].isnan().tolist() == [True, False]
    assert 0 <= tokens.min() <= tokens.max() < 50


def test_filters_other_dtypes_and_devices_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if keyed_sampling_kernel.kernel() is None:
        pytest.skip("no C compiler")
    assert find_kernel(torch.empty(1)) is keyed_sampling_kernel.kernel()
    assert find_kernel(torch.empty(1).double()) is None
    assert find_kernel(torch.empty(1, device="meta")) is None
    logits, noise = drawn(1, 1, 40), GumbelNoise(40, _CPU)
    sampler = Sampler([new_request(0, (1,), Sampling(top_k=1))], noise, logits)
    likeliest = logits.argmax(-1)
    assert torch.equal(sampler.draw(logits, -100 * logits)[0], likeliest)
