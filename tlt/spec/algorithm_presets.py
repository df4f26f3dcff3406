"""Values of `algorithm.*` that belong together, by the name of the method: `algorithm.preset`.

A preset fills in the keys that the spec doesn't set, before the spec is checked.
"""

from collections.abc import Mapping
from typing import Any

from tlt.errors import ConfigError
from tlt.spec.rollout import DEFAULT_MAX_NEW_TOKENS

# most papers make several optimiser steps of a batch; with one, the ratio is 1 and nothing clips
_STEPS = {"minibatches": 4}
_CLIPPED = {**_STEPS, "clip_low": 0.2, "clip_high": 0.2}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2402.03300
    "grpo": {**_CLIPPED, "averaging": "sequence", "kl_coefficient": 0.04},
    # 2503.20783: no deviation, and answers divided by a constant length
    "dr_grpo": {**_CLIPPED, "averaging": "constant", "normalise_advantage": False},
    # 2402.14740: one step of a batch, as REINFORCE
    "rloo": {
        "loss": "rloo",
        "advantage": "leave_one_out",
        "normalise_advantage": False,
        "averaging": "sequence",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # 2501.03262
    "reinforce++": {**_CLIPPED, "advantage": "batch", "kl_in": "reward", "kl_coefficient": 0.01},
    "reinforce++-baseline": {**_CLIPPED, "advantage": "group_batch"},
    # 2503.14476; its punishment of long answers is `algorithm.overlong_tokens`
    "dapo": {
        **_STEPS,
        "clip_low": 0.2,
        "clip_high": 0.28,
        "averaging": "token",
        "dynamic_sampling": True,
    },
    # 2507.18071
    "gspo": {
        **_STEPS,
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "averaging": "sequence",
    },
    # 2506.13585; the cap of 5 is that of 2510.13786
    "cispo": {**_STEPS, "loss": "cispo", "clip_high": 4.0, "averaging": "token"},
    # 2511.20347
    "sapo": {**_STEPS, "loss": "sapo", "averaging": "sequence"},
}


def apply_preset(raw: dict[str, Any], where: str) -> None:
    """Fill in what a spec's preset sets and the spec doesn't."""
    algorithm = raw.get("algorithm")
    if not isinstance(algorithm, dict) or (name := algorithm.get("preset")) is None:
        return
    if name not in PRESETS:
        raise ConfigError(f"{where}: algorithm.preset: no preset '{name}': {', '.join(PRESETS)}")
    for key, value in PRESETS[name].items():
        algorithm.setdefault(key, value)
    if algorithm.get("averaging") == "constant":
        rollout = raw.get("rollout")
        given = rollout.get("max_new_tokens") if isinstance(rollout, dict) else None
        algorithm.setdefault("averaged_tokens", DEFAULT_MAX_NEW_TOKENS if given is None else given)
