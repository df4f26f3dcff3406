"""Invariant: a run writes the data, the model and a record of what it measured, or fails.

python -m examples.tiny_reasoner.make [--out DIR] [--seed 0] [--shallow-steps N] [--deep-steps N]
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples.tiny_reasoner.export import round_to_bf16, write_model
from examples.tiny_reasoner.network import Network, Shape
from examples.tiny_reasoner.sampling import measure
from examples.tiny_reasoner.task import Habits, eval_problems, prompt_text, write_data
from examples.tiny_reasoner.training import Stage, WorkedBatches, stacked, train
from examples.tiny_reasoner.vocabulary import BOS, encode

SHALLOW_LAYERS = 8
LOGIT_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    seed: int
    shape: Shape
    shallow: Stage
    deep: Stage
    habits: Habits


@dataclass(frozen=True)
class Trained:
    """A network rounded to the stored precision, and its training figures."""

    network: Network
    shallow_loss: float
    deep_loss: float
    shallow_cpu_seconds: float
    deep_cpu_seconds: float


def train_recipe(recipe: Recipe) -> Trained:
    """Train both stages one after the other."""
    torch.manual_seed(recipe.seed)
    held_out = frozenset(eval_problems(recipe.seed))
    batches = iter(WorkedBatches(recipe.seed, held_out, recipe.habits))
    shallow = Network(replace(recipe.shape, layers=SHALLOW_LAYERS))
    times = [time.process_time()]
    shallow_loss = train(shallow, batches, recipe.shallow)
    times.append(time.process_time())
    network = stacked(shallow, recipe.shape.layers)
    deep_loss = train(network, batches, recipe.deep)
    times.append(time.process_time())
    round_to_bf16(network)
    return Trained(network, shallow_loss, deep_loss, times[1] - times[0], times[2] - times[1])


@torch.inference_mode()
def logit_gap(network: Network, folder: Path) -> float:
    """Return the greatest difference from the logits of Transformers on the written files."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = (prompt_text(problem) for problem in eval_problems(count=8))
    inputs = (torch.tensor([[BOS, *encode(text)]]) for text in texts)
    return max((loaded(ids).logits - network(ids)).abs().max().item() for ids in inputs)


def make(recipe: Recipe, folder: Path) -> dict[str, object]:
    """Write data/, model/ and record.json, and return the record."""
    write_data(folder / "data", recipe.seed)
    trained = train_recipe(recipe)
    network = trained.network
    write_model(network, folder / "model")
    gap = logit_gap(network, folder / "model")
    if gap > LOGIT_TOLERANCE:
        raise RuntimeError(f"transformers computes logits that are {gap} off")
    record: dict[str, object] = {
        "recipe": asdict(recipe),
        "parameters": sum(p.numel() for p in network.parameters()),
        "cpu_seconds": [round(trained.shallow_cpu_seconds), round(trained.deep_cpu_seconds)],
        "loss": [round(trained.shallow_loss, 4), round(trained.deep_loss, 4)],
        "held_out": asdict(measure(network, eval_problems(recipe.seed))),
        "logit_gap_to_transformers": gap,
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def main() -> None:
    """Read the command line, run, print the record."""
    parser = argparse.ArgumentParser(description="Remake the tiny reasoner.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--shallow-steps", type=int, default=1600)
    parser.add_argument("--deep-steps", type=int, default=180)
    parser.add_argument("--shallow-rate", type=float, default=0.01)
    parser.add_argument("--deep-rate", type=float, default=0.01)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(
        seed=options.seed,
        shape=Shape(layers=options.layers),
        shallow=Stage(options.shallow_steps, options.shallow_rate),
        deep=Stage(options.deep_steps, options.deep_rate),
        habits=Habits(),
    )
    print(json.dumps(make(recipe, options.out), indent=2))


if __name__ == "__main__":
    main()
