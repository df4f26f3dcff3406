"""A LoRA adapter beside a policy's weights, which stay as they are, in one copy; peft computes it.

Its tensors have the names of peft's files, and the policy's those of its folder.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from tlt.errors import ConfigError
from tlt.spec.config import LoraSpec, PolicySpec

# peft's name of the only adapter, which its files leave out
_NAME = "default"
_PREFIX = "base_model.model."


class LoraAdapter:
    def __init__(self, model: PreTrainedModel, spec: LoraSpec, seed: int) -> None:
        """Add an adapter that changes nothing yet; the same seed gives the same on all ranks."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                inject_adapter_in_model(_peft_config(spec), model, _NAME)
            except ValueError as error:
                first, *_ = str(error).splitlines() or [""]
                raise ConfigError(f"policy.lora.targets: {first}") from error
        self._layers = _adapted_layers(model, spec)
        self._rate, self._seed, self._device = spec.dropout, seed, model.device
        self._drawing: tuple[int, int, int] | None = None
        self._activate_dropout(False)
        learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parameters: dict[str, Tensor] = {
            _PREFIX + name.replace(f".{_NAME}.", "."): p for name, p in learned.items()
        }
        self.weights = MergedWeights(
            {
                name.replace(".base_layer.", "."): parameter
                for name, parameter in model.named_parameters()
                if name not in learned
            },
            {f"{name}.weight": layer for name, layer in self._layers.items()},
        )

    @contextmanager
    def disabled(self) -> Generator[None]:
        """Compute the policy's own weights alone."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    @contextmanager
    def dropout(self, step: int, rank: int) -> Generator[None]:
        """Drop inputs during an update, the same whenever this rank makes it again."""
        if self._rate == 0:
            yield
            return
        devices = [self._device] if self._device.type == "cuda" else []
        self._drawing = (self._seed, step, rank)
        with torch.random.fork_rng(devices=devices):
            self._activate_dropout(True)
            try:
                yield
            finally:
                self._activate_dropout(False)
                self._drawing = None

    def seed_dropout(self, number: int) -> None:
        """Draw the inputs to drop by a number; outside of an update none are dropped."""
        if self._drawing is not None:
            torch.manual_seed(hash((*self._drawing, number)))

    def _activate_dropout(self, active: bool) -> None:
        for layer in self._layers.values():
            layer.lora_dropout[_NAME].train(active)


class MergedWeights(Mapping[str, Tensor]):
    """Weights with the adapter's product added, each in float32 and whenever it is read."""

    def __init__(self, base: Mapping[str, Tensor], layers: Mapping[str, Linear]) -> None:
        self._base = base
        self._layers = layers

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._base.items()}

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name].detach()
        layer = self._layers.get(name)
        return weight if layer is None else weight + layer.get_delta_weight(_NAME)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def write_adapter_config(
    folder: Path, spec: LoraSpec, policy: PolicySpec, parameters: Iterable[str]
) -> None:
    """Write adapter_config.json for an adapter that has these parameters."""
    config = _peft_config(spec)
    config.base_model_name_or_path, config.revision = policy.path, policy.revision
    config.inference_mode = True
    if spec.targets == "all-linear":
        # not every reader of the file knows that word
        layers = (name.partition(".lora_")[0] for name in parameters)
        config.target_modules = sorted({layer.rpartition(".")[2] for layer in layers})
    config.save_pretrained(str(folder))


def _peft_config(spec: LoraSpec) -> LoraConfig:
    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        task_type="CAUSAL_LM",
    )


def _adapted_layers(model: PreTrainedModel, spec: LoraSpec) -> dict[str, Linear]:
    """Return the layers that have an adapter by name, or refuse those that can't be merged."""
    layers: dict[str, Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if (
            not isinstance(module, Linear)
            or not isinstance(module.base_layer, nn.Linear)
            or module is model.get_output_embeddings()
        ):
            raise ConfigError(f"policy.lora.targets: {name}: only layers' matrices get an adapter")
        # autocast converts the inputs; peft would convert them to float32 before
        module.cast_input_dtype_enabled = False
        layers[name] = module
    if isinstance(spec.targets, tuple):
        for target in spec.targets:
            if not any(f".{name}".endswith(f".{target}") for name in layers):
                raise ConfigError(f"policy.lora.targets: the policy has no module {target}")
    return layers
