"""AdamW whose state has names: what one process saved, another continues to the bit.

The state of shards is saved by torch.distributed.checkpoint, and read by any number of ranks. All
parameters step together, so one count serves them all. Before the first step there is no state.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import AdamW

from tlt.errors import ConfigError
from tlt.spec.config import AlgorithmSpec
from tlt.trainer.collectives import translate_errors
from tlt.trainer.named_tensors import copy_named

# the file of torch.distributed.checkpoint that describes the others
METADATA = ".metadata"
_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    def __init__(self, parameters: dict[str, Tensor], spec: AlgorithmSpec) -> None:
        self._parameters = parameters
        matrices = [p for p in parameters.values() if p.dim() >= 2]
        # weight decay on norms and biases regularises nothing
        vectors = [p for p in parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": spec.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
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

    def reset(self, steps: int) -> None:
        """Set all moments to zero after `steps` steps; after none there is no state at all."""
        self._adamw.state.clear()
        if steps == 0:
            return
        for parameter in self._parameters.values():
            self._adamw.state[parameter] = {
                _STEP: torch.tensor(float(steps), device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in _MOMENTS},
            }

    def moments(self) -> dict[str, Tensor]:
        """Return the live tensors, in the order of the parameters."""
        return {
            f"{name}.{moment}": self._adamw.state[parameter][moment]
            for name, parameter in self._parameters.items()
            if parameter in self._adamw.state
            for moment in _MOMENTS
        }

    def state(self) -> dict[str, Tensor]:
        return {_STEP: torch.tensor(self.steps()), **self.moments()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        if _STEP not in state:
            raise ConfigError("the optimiser state lacks its step count")
        self.reset(int(state[_STEP].item()))
        moments = {name: tensor for name, tensor in state.items() if name != _STEP}
        copy_named(self.moments(), moments, "optimiser state")

    def save(self, folder: Path) -> None:
        """Write this rank's part of the state into a folder that all ranks share."""
        with translate_errors("saving the optimiser's state"):
            save(dict(self.state()), checkpoint_id=folder)

    def load_folder(self, folder: Path) -> None:
        """Read this rank's part of the state, whatever number of ranks saved it."""
        with translate_errors("loading the optimiser's state"):
            saved = FileSystemReader(folder).read_metadata().state_dict_metadata
            self.reset(1 if len(saved) > 1 else 0)
            state = dict(self.state())
            load(state, checkpoint_id=folder)
        steps = float(state[_STEP].item())
        for own in self._adamw.state.values():
            own[_STEP].fill_(steps)
