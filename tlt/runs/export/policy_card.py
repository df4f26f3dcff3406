"""Write the model card of an exported policy: what it was, what was trained, and what it gained."""

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml

from tlt.report import Ledger, Snapshot, StoredPolicy
from tlt.spec.config import JobSpec
from tlt.spec.section import Section

# the folder of a model in the cache of huggingface_hub
_CACHED = re.compile(r"^models--([^/]+)--([^/]+)$")
# what a derived model has to keep
_KEPT = ("license", "license_name", "license_link", "language")
# keys whose values are paths of the machine that trained it
_PATHS = ("path", "train", "eval", "function", "writable")

_CARD = """---
{metadata}---
# {base}, trained with TLT

Version {version} of the policy that TLT {tlt} trained by reinforcement learning in job `{job}`.

| | |
|---|---|
| base model | {base}{commit} |
| steps | {steps} |
| answers in each step | {prompts} prompts × {members} |
| held-out reward | {held_out} |
| training reward | {rewards} |
| weights | {dtype}, from the run's file `{digest}` (its digest) |

Answers were sampled at temperature {temperature}{filters}, and ended after {longest} tokens.
Load the folder with `AutoModelForCausalLM` and `AutoTokenizer` of Transformers, or serve it:
`python -m sglang.launch_server --model-path THIS_FOLDER`.

## How it was trained

The job's spec, without defaults and folders:

```yaml
{spec}```
"""


def policy_card(ledger: Ledger, stored: StoredPolicy, dtype: str) -> str:
    spec, snapshot, hub_policy = published_spec(ledger), ledger.snapshot(), ledger.hub_policy
    initial, rollout = Path(ledger.spec.policy.path), spec.rollout
    filters = {"top_k": rollout.top_k, "top_p": rollout.top_p, "min_p": rollout.min_p}
    used = [f", {name} {value}" for name, value in filters.items()] if rollout.filtered else []
    return _CARD.format(
        metadata=_to_yaml(_metadata(initial, spec)),
        base=base_model(initial) or initial.name,
        commit="" if hub_policy is None else f", commit `{hub_policy.commit}`",
        version=stored.version,
        tlt=importlib.metadata.version("tlt-rl"),
        job=snapshot.job,
        steps=_describe_steps(snapshot, stored),
        prompts=spec.algorithm.prompts_per_step,
        members=spec.algorithm.group_size,
        held_out=_describe_evals(snapshot, stored),
        rewards=_describe_rewards(snapshot, stored),
        dtype=dtype,
        digest=stored.weights.digest,
        temperature=rollout.temperature,
        filters="".join(used),
        longest=rollout.max_new_tokens,
        spec=_to_yaml(_without_defaults(spec)),
    )


def published_spec(ledger: Ledger) -> JobSpec:
    """Return the spec with a policy of the Hub by its id and commit."""
    hub_policy = ledger.hub_policy
    return ledger.spec if hub_policy is None else hub_policy.with_commit(ledger.spec)


def base_model(folder: Path) -> str | None:
    """Return the model's name on the Hub, where the folder tells; the Hub refuses any other."""
    found = next((_CACHED.match(part) for part in folder.parts if _CACHED.match(part)), None)
    return None if found is None else f"{found[1]}/{found[2]}"


def _metadata(initial: Path, spec: JobSpec) -> dict[str, Any]:
    known = _front_matter(initial / "README.md")
    base = base_model(initial)
    return {
        **{key: known[key] for key in _KEPT if key in known},
        **({} if base is None else {"base_model": base}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", spec.algorithm.name, "tlt"],
    }


def _front_matter(card: Path) -> dict[str, Any]:
    """Return the metadata of the base model's card; none if it has none."""
    try:
        _, metadata, _ = card.read_text(encoding="utf-8").split("---\n", 2)
        found = yaml.safe_load(metadata)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _describe_steps(snapshot: Snapshot, stored: StoredPolicy) -> str:
    start = "" if snapshot.starts_from is None else f", the first ones in {snapshot.starts_from}"
    return f"{stored.version} of {snapshot.steps_planned}{start}"


def _describe_evals(snapshot: Snapshot, stored: StoredPolicy) -> str:
    scores = {done.version: done.describe_score() for done in snapshot.evals}
    after = scores.get(stored.version)
    if not scores or snapshot.evals[0].version >= stored.version:
        return after or "not measured"
    return f"{snapshot.evals[0].describe_score()} before, {after or 'not measured'} after"


def _describe_rewards(snapshot: Snapshot, stored: StoredPolicy) -> str:
    steps = [step for step in snapshot.steps if step.step < stored.version]
    if not steps:
        return "not measured"
    first, last = steps[0], steps[-1]
    return (
        f"{first.reward:.3f} in step {first.step}, {last.reward:.3f} in step {last.step} (the last)"
    )


def _without_defaults(section: Section) -> dict[str, Any]:
    """Return what a spec sets; of paths the last part, because the rest says where it ran."""
    return {
        field.name: _plain(field.name, value)
        for field in msgspec.structs.fields(section)
        if (value := getattr(section, field.name)) != _default(field)
    }


def _plain(name: str, value: Any) -> Any:
    match value:
        case Section():
            return _without_defaults(value)
        case dict():
            named = cast("dict[str, Any]", value)
            return {key: _plain(name, each) for key, each in named.items()}
        case tuple() | list():
            return [_plain(name, each) for each in cast("Sequence[Any]", value)]
        case str() if name in _PATHS:
            return Path(value).name if value.startswith("/") else value
        case _:
            return msgspec.to_builtins(value)


def _default(field: msgspec.structs.FieldInfo) -> object:
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _to_yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
