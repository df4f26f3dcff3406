"""Make a job that only evaluates: one evaluation of a policy, without a step of training."""

from pathlib import Path

import msgspec

from tlt.base.strategies import Draft
from tlt.errors import ConfigError
from tlt.spec.config import JobSpec, PolicySpec, SpeculationSpec
from tlt.spec.spec_files import replace_policy


def evaluation_job(spec: JobSpec, where: str, policy: Path | None = None) -> JobSpec:
    """Return a job that evaluates a folder, by default the spec's policy, on the spec's sets.

    Drafters aren't trained, because a single rollout batch doesn't pay for it.
    """
    if not spec.data.evaluation_sets:
        raise ConfigError(f"{where}: data.eval: an evaluation needs held-out data")
    replace = msgspec.structs.replace
    undrafted = isinstance(spec.speculation.strategy, Draft) and spec.drafter.path is None
    return replace(
        spec,
        name=f"{spec.name}-eval",
        policy=spec.policy if policy is None else _another(spec.policy, policy),
        algorithm=replace(spec.algorithm, steps=0, eval_every=1, keep_best=False),
        speculation=SpeculationSpec(mode="off") if undrafted else spec.speculation,
        drafter=replace(spec.drafter, train="off"),
        loggers=(),
    )


def _another(policy: PolicySpec, path: Path) -> PolicySpec:
    unrevised = msgspec.structs.replace(policy, revision=None)
    return replace_policy(unrevised, str(path), Path.cwd())
