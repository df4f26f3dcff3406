"""Export the drafter that a run used last, with a model card."""

import contextlib
import hashlib
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from tlt.blobs.blob_files import committed_blobs
from tlt.errors import BlobError, ConfigError, TltError
from tlt.models.config_json import read_config
from tlt.models.decoder_from_folder import load_embedding_and_head
from tlt.models.decoder_spec import EMBEDDING, HEAD
from tlt.models.drafter_folder import (
    TOKEN_MAP,
    load_drafter,
    read_drafter_config,
    read_update_count,
    save_drafter,
)
from tlt.models.eagle_drafter import (
    Drafter,
    DrafterConfig,
    architecture,
    describe_misfit,
    new_drafter,
)
from tlt.models.safetensors_io import read_weights
from tlt.policies.drafter.drafter_state import DrafterState
from tlt.protocol.commands import StartJob
from tlt.protocol.events import PolicyPublished
from tlt.protocol.refs import DrafterRef
from tlt.report import Ledger, StoredPolicy
from tlt.runs.export.new_folder import new_folder
from tlt.runs.export.policy_card import base_model
from tlt.runs.run_folder_reader import journal_entries
from tlt.spec.config import JobSpec
from tlt.trainer.drafter.initial_drafter import drafter_config_for

_CARD = """---
library_name: sglang
tags: [speculative-decoding, {layout}]
---
# A drafter for {policy}

It proposes the next tokens of that policy. The policy verifies them, so that answers stay its own.
Trained in job `{job}` by workers that had no prompts left to answer.

| | |
|---|---|
| policy it learned from | version {version} of `{job}`, which began as `{policy}` |
| digest of that policy's weights | `{policy_digest}` |
| micro-batches | {micro_batches} |
| tokens it learned from | {tokens} |
| accept length | {accept} |
| accept length in rollouts | {rollouts} |
| tokens that it can propose | {proposes} |
| architecture digest | `{architecture}` |
| digest of its own weights | `{digest}` |

Serve it with SGLang: `--speculative-algorithm {algorithm}`,
`--speculative-draft-model-path THIS_FOLDER`{token_map}.
Start another TLT job with it: `drafter: {{path: THIS_FOLDER}}`.
"""


def export_drafter(run: Path, ledger: Ledger, job: str, folder: Path) -> str:
    """Write the drafter's folder and return a line that describes the drafter."""
    drafter_state, spec = ledger.state.drafter, ledger.spec
    if drafter_state.adoption.used is None:
        raise ConfigError(f"{job}: it has not used a drafter that it trained yet")
    drafter = read_drafter(run, spec, drafter_state.adoption.used)
    head = None
    if drafter.config.hot_tokens is not None:
        head = read_head(run, ledger.snapshot().last, Path(spec.policy.path))
    with new_folder(folder) as unfinished:
        save_drafter(drafter, unfinished, total_updates(spec, drafter_state.adoption.used), head)
        card = _card(run, job, ledger, drafter_state.adoption.used, drafter)
        (unfinished / "README.md").write_text(card)
    evaluation = _describe_evaluation(drafter_state)
    return f"drafter of {job}, version {drafter_state.adoption.used.version}, {evaluation}"


def read_drafter(run: Path, spec: JobSpec, used: DrafterRef) -> Drafter:
    """Load a drafter that the run has used."""
    drafter = new_drafter(_config(run, spec, used))
    try:
        with committed_blobs(run) as blobs:
            drafter.load_state_dict(read_weights(blobs, used.weights))
    except (BlobError, RuntimeError) as error:
        raise ConfigError(f"{run}: the drafter cannot be read: {error}") from error
    return drafter


def read_head(run: Path, stored: StoredPolicy | None, initial: Path) -> Tensor:
    """Load the head of a policy of the run, or that of the initial one."""
    if stored is None:
        return load_embedding_and_head(initial, torch.float32, torch.device("cpu"))[1]
    with (
        committed_blobs(run) as blobs,
        safe_open(blobs.verify(stored.weights), framework="pt") as weights,
    ):
        return weights.get_tensor(HEAD if HEAD in weights.keys() else EMBEDDING)  # noqa: SIM118


def _config(run: Path, spec: JobSpec, used: DrafterRef) -> DrafterConfig:
    """Return the shape that fits the weights: that of a new drafter or of the one in the spec."""
    policy = read_config(Path(spec.policy.path))
    # jobs of earlier versions trained drafters that propose all tokens
    candidates = [
        drafter_config_for(policy, spec.drafter.layout, hot_tokens)
        for hot_tokens in (spec.drafter.most_tokens, None)
    ]
    if spec.drafter.path is not None:
        with contextlib.suppress(TltError):
            candidates.append(read_drafter_config(Path(spec.drafter.path), policy.layers))
    for config in candidates:
        if architecture(config) == used.architecture:
            return config
    other = f", nor that of {spec.drafter.path}" if spec.drafter.path else ""
    raise ConfigError(f"{run}: the drafter's shape is not that of a new one{other}")


def total_updates(spec: JobSpec, used: DrafterRef) -> int | None:
    """Count the updates, those of the drafter in the spec included; None if that is not known."""
    before = _updates_before(spec, used)
    return None if before is None else before + used.updates


def _updates_before(spec: JobSpec, used: DrafterRef) -> int | None:
    if spec.drafter.path is None:
        return 0
    folder = Path(spec.drafter.path)
    try:
        policy = read_config(Path(spec.policy.path))
        named = load_drafter(folder, policy.layers)
        fits = (
            architecture(named.config) == used.architecture
            and describe_misfit(named, policy) is None
        )
        return read_update_count(folder) if fits else 0
    except TltError:
        return None


def _card(run: Path, job: str, ledger: Ledger, used: DrafterRef, drafter: Drafter) -> str:
    spec, drafter_state = ledger.spec, ledger.state.drafter
    layout, initial = drafter.config.layout, Path(spec.policy.path)
    training, hot = ledger.snapshot().drafter_training, drafter.config.hot_tokens
    has_token_map = hot is not None and layout == "eagle"
    return _CARD.format(
        job=job,
        policy=base_model(initial) or initial.name,
        layout=layout,
        version=used.policy,
        policy_digest=_policy_digest(run, spec, used),
        micro_batches=used.micro_batches,
        tokens="none" if training is None else f"{training.tokens.total:,}",
        rollouts=_describe_rollouts(drafter_state),
        accept=_describe_evaluation(drafter_state),
        architecture=used.architecture,
        digest=used.weights.digest,
        token_map=f", `--speculative-token-map THIS_FOLDER/{TOKEN_MAP}`" if has_token_map else "",
        proposes="all" if hot is None else f"{hot:,} of {drafter.config.vocabulary:,}",
        algorithm="EAGLE" if layout == "eagle" else "EAGLE3",
    )


def _describe_evaluation(drafter_state: DrafterState) -> str:
    used = drafter_state.adoption.used
    # only the last evaluations are kept
    evaluations = drafter_state.evidence.evaluations
    marks = [m for m in evaluations if used is not None and m.version == used.version]
    if not marks:
        return "accept length not measured lately"
    return f"accept length {marks[-1].accept_length:.2f} at depth 6 on held-out answers"


def _describe_rollouts(drafter_state: DrafterState) -> str:
    depths = sorted(drafter_state.adoption.live.items(), key=lambda each: int(each[0].split()[0]))
    lengths = [f"{a.tokens / a.rows:.2f} at depth {depth}" for depth, a in depths if a.rows]
    return ", ".join(lengths) or "not measured yet"


def _policy_digest(run: Path, spec: JobSpec, used: DrafterRef) -> str:
    for entry in journal_entries(run):
        event = entry.event
        if isinstance(event, StartJob) and event.starts_from is not None:
            start = event.starts_from
            if used.policy < start.checkpoint.version:
                return f"not known: it was a version of {start.job}"
            if used.policy == start.checkpoint.version:
                return start.checkpoint.weights.digest
        if isinstance(event, PolicyPublished) and event.policy.version == used.policy:
            assert event.policy.weights is not None
            return event.policy.weights.digest
    digest = hashlib.blake2b(digest_size=20)
    for file in sorted(Path(spec.policy.path).glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    return digest.hexdigest()
