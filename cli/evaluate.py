"""tlt eval: score a policy on a spec's held-out data, without a session."""

from pathlib import Path
from typing import Annotated

import typer

from cli.arguments import Json, Set, SpecFile
from cli.output import print_json, say
from cli.spec_loading import load_runnable
from tlt.errors import ConfigError
from tlt.report.statistics import mean, standard_error


def evaluate(
    spec: SpecFile,
    policy: Annotated[
        Path | None, typer.Option(help="A model folder; the spec's policy by default.")
    ] = None,
    changes: Set = None,
    json: Json = False,
) -> None:
    """Score a policy on the spec's data.eval."""
    loaded = load_runnable(spec, changes)
    if loaded.data.eval is None:
        raise ConfigError(f"{spec}: data.eval: an evaluation needs held-out data")
    from tlt.offline_evaluation import held_out_rewards

    model = str(policy.resolve()) if policy is not None else loaded.policy.path
    rewards = held_out_rewards(loaded, model)
    score, stderr = mean(rewards), standard_error(rewards)
    if json:
        print_json({"policy": model, "mean": score, "stderr": stderr, "problems": len(rewards)})
    else:
        say(f"{score:.3f} ± {stderr:.3f} on {len(rewards)} problems ({model})")
