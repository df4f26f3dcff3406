"""Muon for matrices, Adam for the rest; the state has names and one step count.

A step is computed aside and applied at its end, so an interrupted one leaves everything as it was.

Muon moves a matrix by the orthogonal matrix nearest to its momentum: every direction by the same
length, whatever its gradient's. If the sizes of a matrix's inputs are known, it learns as if they
were one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.trainer.drafter.interruptible_matmul import matmul
from tlt.trainer.named_tensors import copy_named

_MOMENTUM = 0.95
_BETAS = (0.9, 0.99)
_EPSILON = 1e-8
# the quintic whose iteration drives singular values towards one (Jordan et al., 2024)
_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class _PendingUpdate(NamedTuple):
    """A parameter's computed step that isn't applied yet, and the moments after it."""

    direction: Tensor
    rate: float
    first: Tensor
    second: Tensor | None = None


class MuonWithAdam:
    def __init__(self, parameters: Mapping[str, Tensor], sizes: Mapping[str, Tensor]) -> None:
        """`sizes` are those of a matrix's inputs, by column, where they aren't one."""
        self._parameters = dict(parameters)
        self._sizes = dict(sizes)
        self._first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self._second = {n: torch.zeros_like(p) for n, p in parameters.items() if p.dim() < 2}
        self._steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor],
        matrix_rate: float,
        vector_rate: float,
        check: CheckInterrupt = never_interrupt,
    ) -> None:
        steps = self._steps + 1
        pending: dict[str, _PendingUpdate] = {}
        for name, parameter in self._parameters.items():
            if parameter.dim() < 2:
                pending[name] = self._adam_update(name, gradients[name], steps, vector_rate)
            else:
                gain = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                pending[name] = self._muon_update(name, gradients[name], matrix_rate * gain, check)
            check()
        self._steps = steps
        for name, update in pending.items():
            self._parameters[name].sub_(update.direction, alpha=update.rate)
            self._first[name] = update.first
            if update.second is not None:
                self._second[name] = update.second

    def state(self) -> dict[str, Tensor]:
        return {"steps": torch.tensor(self._steps), **self._moments()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        moments = {name: tensor for name, tensor in state.items() if name != "steps"}
        copy_named(self._moments(), moments, "drafter's optimiser state")
        self._steps = int(state["steps"])

    def _moments(self) -> dict[str, Tensor]:
        return {
            **{f"{name}.first": moment for name, moment in self._first.items()},
            **{f"{name}.second": moment for name, moment in self._second.items()},
            **{f"{name}.sizes": sizes for name, sizes in self._sizes.items()},
        }

    def _muon_update(
        self, name: str, gradient: Tensor, rate: float, check: CheckInterrupt
    ) -> _PendingUpdate:
        sizes = self._sizes.get(name)
        if sizes is not None:
            gradient = gradient / sizes
        momentum = self._first[name].lerp(gradient, 1 - _MOMENTUM)
        direction = orthogonalise(gradient.lerp(momentum, _MOMENTUM), check)
        return _PendingUpdate(direction if sizes is None else direction / sizes, rate, momentum)

    def _adam_update(self, name: str, gradient: Tensor, steps: int, rate: float) -> _PendingUpdate:
        first = self._first[name].lerp(gradient, 1 - _BETAS[0])
        second = self._second[name].lerp(gradient.square(), 1 - _BETAS[1])
        mean = first / (1 - _BETAS[0] ** steps)
        size = (second / (1 - _BETAS[1] ** steps)).sqrt_()
        return _PendingUpdate(mean / size.add_(_EPSILON), rate, first, second)


def orthogonalise(matrix: Tensor, check: CheckInterrupt = never_interrupt) -> Tensor:
    """Bring all singular values between 0.7 and 1.2, by matrix products alone."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        square = matmul(x, x.T, check)
        mixed = b * square + c * matmul(square, square, check)
        x = a * x + matmul(mixed, x, check)
    return x.T if tall else x
