"""Choose what an update changes of a policy: all weights, all but some, or an adapter's."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from tlt.errors import ConfigError
from tlt.spec.config import LoraSpec


@dataclass(frozen=True, kw_only=True)
class TrainedPart:
    lora: LoraSpec | None = None
    # patterns of weights' names
    freeze: tuple[str, ...] = ()
    # of an adapter's first values and of its dropout
    seed: int = 0


ALL_WEIGHTS = TrainedPart()


def freeze_weights(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Stop training the weights that match; a pattern that matches none is refused."""
    weights = dict(model.named_parameters())
    for pattern in patterns:
        matching = [name for name in weights if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"policy.freeze: {pattern} matches no weight (a tied head is the embedding)"
            )
        for name in matching:
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError("policy.freeze leaves no weight to train")
