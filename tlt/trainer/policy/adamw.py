"""AdamW whose state has names: what one process wrote, another continues to the bit.

All parameters step together, so one count serves them all. Before the first step there is no state.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import AdamW

from tlt.config import AlgorithmSpec
from tlt.errors import ConfigError

_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    def __init__(self, parameters: dict[str, Tensor], spec: AlgorithmSpec) -> None:
        self._parameters = parameters
        matrices = [p for p in parameters.values() if p.dim() >= 2]
        gains = [p for p in parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            # norms and biases: pulling them to zero regularises nothing
            {"params": gains, "weight_decay": 0.0},
        ]
        self._adamw = AdamW(
            [group for group in groups if group["params"]],
            lr=spec.learning_rate,
            betas=spec.betas,
            fused=True,
        )

    def step(self, learning_rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def steps(self) -> int:
        for state in self._adamw.state.values():
            return int(state[_STEP].item())
        return 0

    def start(self, steps: int) -> None:
        """Zero moments after `steps` steps, for somebody to fill; no state at all after none."""
        self._adamw.state.clear()
        if steps == 0:
            return
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                _STEP: torch.tensor(float(steps), device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    def moments(self) -> dict[str, Tensor]:
        """The live tensors, in the order of the parameters."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def state(self) -> dict[str, Tensor]:
        return {_STEP: torch.tensor(self.steps()), **self.moments()}

    def load(self, mapping: Mapping[str, Tensor]) -> None:
        if _STEP not in mapping:
            raise ConfigError("the optimiser state lacks its step count")
        self.start(int(mapping[_STEP].item()))
        moments = self.moments()
        copy_named(moments, {n: t for n, t in mapping.items() if n != _STEP}, "optimiser state")


def copy_named(into: Mapping[str, Tensor], source: Mapping[str, Tensor], what: str) -> None:
    """Copies by name; both sides must have the same names and shapes."""
    require_same_shapes(into, source, what)
    with torch.no_grad():
        for name, tensor in into.items():
            tensor.copy_(source[name])


def require_same_shapes(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], what: str
) -> None:
    """`what` is what theirs are."""
    if odd := sorted(ours.keys() ^ theirs.keys()):
        missing = [name for name in odd if name in ours]
        complaint = f"lacks {missing[0]}" if missing else f"has an unknown {odd[0]}"
        raise ConfigError(f"the {what} {complaint} ({len(odd)} names differ)")
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            shapes = f"{tuple(theirs[name].shape)} instead of {tuple(tensor.shape)}"
            raise ConfigError(f"the {what} has {name} of shape {shapes}")
