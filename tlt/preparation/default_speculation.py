"""Find out whether a job can speculate, and settle a spec that leaves that open."""

from pathlib import Path

from tlt.errors import TltError
from tlt.models.config_json import read_config
from tlt.models.decoder_spec import DecoderConfig, require_divisible
from tlt.spec.config import JobSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for


def complain_of_speculation(spec: JobSpec, policy: DecoderConfig) -> str | None:
    """Say why the job can't speculate with this policy; None if it can, or isn't to."""
    complaint = spec.complain_of_speculation()
    if complaint is not None:
        return complaint
    limit = min(policy.max_positions, spec.policy.max_context or policy.max_positions)
    longest = spec.speculation.longest
    if longest >= limit:
        return f"speculation guesses {longest} tokens at once, in a context of {limit}"
    return _complain_of_new_drafter(spec, policy)


def settle_speculation(spec: JobSpec) -> tuple[JobSpec, str | None]:
    """Return the spec that the job would run by, and why it doesn't speculate by default.

    A policy that isn't in a folder is judged when the job is prepared.
    """
    if not spec.may_fall_back:
        return spec.settle_speculation(None), None
    if (Path(spec.policy.path) / "config.json").is_file():
        complaint = complain_of_speculation(spec, read_config(Path(spec.policy.path)))
    else:
        complaint = spec.complain_of_speculation()
    return spec.settle_speculation(complaint), complaint


def _complain_of_new_drafter(spec: JobSpec, policy: DecoderConfig) -> str | None:
    """Say why no drafter can be made for the policy; None if it can, or needn't."""
    # SGLang starts with a drafter whenever it speculates
    needed = spec.drafter.train != "off" or (
        spec.rollout.engine == "sglang" and spec.speculation.mode != "off"
    )
    if spec.drafter.path is not None or not needed:
        return None
    width = spec.rollout.tensor_parallel
    # a policy that can't be divided is refused, with speculation or without
    try:
        made = drafter_config_for(policy, spec.drafter.layout, spec.drafter.most_tokens)
        require_divisible(width, made.kv_heads, made.intermediate, "drafter", made.hot_tokens)
    except TltError as error:
        return str(error)
    return None
