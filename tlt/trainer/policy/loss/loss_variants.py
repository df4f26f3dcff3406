"""Losses of one token, chosen by name or a function of the user's: `algorithm.loss`.

Each is a function of the ratio between the policy's present probability of a token and the one
before the update's first step. A sum of them over tokens, with weights, is a minibatch's loss.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.base.own_functions import load_tensor_function
from tlt.errors import ConfigError
from tlt.spec.config import AlgorithmSpec
from tlt.spec.data_and_algorithm import is_own_function
from tlt.trainer.policy.model.micro_batches import MicroBatch

# differences of log-probs are bounded, because their exponentials would overflow
MOST_NATS = 20.0
# SAPO's temperatures for good and for bad answers
_GOOD_TEMPERATURE, _BAD_TEMPERATURE = 1.0, 1.05


class TokenLoss(NamedTuple):
    loss: Tensor
    # True for tokens whose ratio lies beyond a bound, so that they teach nothing or less
    clipped_low: Tensor
    clipped_high: Tensor


TokenLossFunction = Callable[[AlgorithmSpec, MicroBatch, Tensor, Tensor], TokenLoss]


def clipped(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> TokenLoss:
    """Clip the ratio as PPO and GRPO do (arXiv 1707.06347), and with a dual clip (1912.09729)."""
    ratio, advantage = bounded_exp(current - old), batch.advantage
    surrogate = _clipped_surrogate(spec, ratio, advantage)
    # a token of a bad answer that has become far likelier would outweigh all others
    floor = torch.where(advantage < 0, spec.dual_clip * advantage, -torch.inf)
    low, high = _beyond(spec, ratio, advantage)
    high |= (ratio > spec.dual_clip) & (advantage < 0)
    return TokenLoss(-torch.maximum(surrogate, floor), low, high)


def gspo(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> TokenLoss:
    """Clip one ratio for all tokens of an answer, their geometric mean (arXiv 2507.18071)."""
    return _clipped_answer(spec, batch, batch.sum_by_answer((current - old) / batch.length))


def rloo(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> TokenLoss:
    """Clip one ratio for all tokens of an answer, their product (arXiv 2402.14740)."""
    return _clipped_answer(spec, batch, batch.sum_by_answer(current - old))


def cispo(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> TokenLoss:
    """Clip the weight of a token's policy gradient from above only (arXiv 2506.13585)."""
    ratio = bounded_exp(current - old).detach()
    weight = ratio.clamp(max=1.0 + spec.clip_high)
    high = ratio > 1.0 + spec.clip_high
    return TokenLoss(-weight * batch.advantage * current, torch.zeros_like(high), high)


def sapo(spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor) -> TokenLoss:
    """Let the gradient fade out as the ratio leaves 1, without bounds (arXiv 2511.20347)."""
    ratio, advantage = bounded_exp(current - old), batch.advantage
    tau = torch.where(advantage > 0, _GOOD_TEMPERATURE, _BAD_TEMPERATURE)
    gate = 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0))
    nothing = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLoss(-gate * advantage, nothing, nothing)


TOKEN_LOSSES: Mapping[str, TokenLossFunction] = {
    "clipped": clipped,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "rloo": rloo,
}


def find_token_loss(spec: AlgorithmSpec) -> TokenLossFunction:
    """Raise ConfigError if a function of the user's can't be loaded."""
    if not is_own_function(spec.loss):
        return TOKEN_LOSSES[spec.loss]
    function = load_tensor_function("algorithm.loss", spec.loss)

    def token_loss(
        spec: AlgorithmSpec, batch: MicroBatch, current: Tensor, old: Tensor
    ) -> TokenLoss:
        found = function(spec, batch, current, old)
        if not isinstance(found, TokenLoss):
            nothing = torch.zeros_like(current, dtype=torch.bool)
            found = TokenLoss(found, nothing, nothing)
        if found.loss.shape != current.shape:
            raise ConfigError(
                f"algorithm.loss: {spec.loss} returned a tensor of {tuple(found.loss.shape)}, "
                f"and there are {len(current)} tokens"
            )
        return found

    return token_loss


def _clipped_answer(spec: AlgorithmSpec, batch: MicroBatch, log_ratios: Tensor) -> TokenLoss:
    ratio = bounded_exp(log_ratios)[batch.owner]
    low, high = _beyond(spec, ratio, batch.advantage)
    return TokenLoss(-_clipped_surrogate(spec, ratio, batch.advantage), low, high)


def _clipped_surrogate(spec: AlgorithmSpec, ratio: Tensor, advantage: Tensor) -> Tensor:
    bounded = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    return torch.minimum(ratio * advantage, bounded * advantage)


def _beyond(spec: AlgorithmSpec, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the lower bound, and where the upper bound stops the gradient."""
    low = (ratio < 1.0 - spec.clip_low) & (advantage < 0)
    return low, (ratio > 1.0 + spec.clip_high) & (advantage > 0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_NATS, MOST_NATS).exp()
