"""The by-product of a run: the drafter that it used last, with a card that says what it is."""

import contextlib
import hashlib
from pathlib import Path

from cli.export import whole_or_not
from cli.journal_follow import entries
from tlt.blobs import Blobs
from tlt.config import JobSpec
from tlt.errors import BlobError, ConfigError, TltError
from tlt.models.config_json import read_config
from tlt.models.drafter_folder import (
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
from tlt.policies.drafter.learning_curve import Mark
from tlt.policies.drafter.training_state import DrafterTrainingState
from tlt.protocol.events import PolicyPublished
from tlt.protocol.refs import DrafterRef
from tlt.report import Ledger
from tlt.trainer.drafter.initial_drafter import drafter_config_for

_CARD = """---
library_name: sglang
tags: [speculative-decoding, {layout}]
---
# A drafter for {policy}

It guesses what that policy writes next; the policy itself decides, so answers stay the policy's.
Trained by `{job}`, by workers that waited for the longest answers of a step.

| | |
|---|---|
| policy it learned from | version {version} of `{job}`, which began as `{policy}` |
| that policy's weights (BLAKE2b) | `{policy_digest}` |
| micro-batches | {updates} |
| tokens it learned from | {tokens} |
| accept length | {accept} |
| accept length in rollouts | {heard} |
| architecture digest | `{architecture}` |
| its own weights (BLAKE2b) | `{digest}` |

Serve it with SGLang: `--speculative-algorithm {algorithm}`,
`--speculative-draft-model-path THIS_FOLDER`.
Begin another TLT job with it: `drafter: {{path: THIS_FOLDER}}`.
"""


def write_drafter(run: Path, ledger: Ledger, job: str, folder: Path) -> str:
    drafter_state, spec = ledger.drafter_state, ledger.spec
    if drafter_state.used is None:
        raise ConfigError(f"{job}: it has used no drafter of its own making yet")
    drafter = read_drafter(run, spec, drafter_state.used)
    with whole_or_not(folder) as unfinished:
        save_drafter(drafter, unfinished, updates_in_all(spec, drafter_state.used))
        card = _card(run, job, ledger, drafter_state.used, drafter)
        (unfinished / "README.md").write_text(card)
    return f"drafter of {job}, version {drafter_state.used.version}, {_accept(drafter_state)}"


def read_drafter(run: Path, spec: JobSpec, used: DrafterRef) -> Drafter:
    """One that the run has used."""
    drafter = new_drafter(_config(run, spec, used))
    try:
        weights = read_weights(Blobs(run / "blobs", run / "blobs"), used.weights)
        drafter.load_state_dict(weights)
    except (BlobError, RuntimeError) as error:
        raise ConfigError(f"{run}: the drafter cannot be read: {error}") from error
    return drafter


def _config(run: Path, spec: JobSpec, used: DrafterRef) -> DrafterConfig:
    """Of the drafter that the job named, or of a new one, if that one was of no use."""
    policy = read_config(Path(spec.policy.path))
    found = [drafter_config_for(policy, spec.drafter.layout)]
    if spec.drafter.path is not None:
        with contextlib.suppress(TltError):
            found.append(read_drafter_config(Path(spec.drafter.path), policy.layers))
    for config in found:
        if architecture(config) == used.architecture:
            return config
    named = f", and nothing in {spec.drafter.path} says it" if spec.drafter.path else ""
    raise ConfigError(f"{run}: the drafter's shape is not that of a new one{named}")


def updates_in_all(spec: JobSpec, used: DrafterRef) -> int | None:
    """What it began with included, if that is known still."""
    before = _updates_before(spec, used)
    return None if used.updates is None or before is None else before + used.updates


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
    spec, drafter_state = ledger.spec, ledger.drafter_state
    layout = drafter.config.layout
    drafting = ledger.snapshot().drafting
    return _CARD.format(
        job=job,
        policy=Path(spec.policy.path).name,
        layout=layout,
        version=used.policy,
        policy_digest=_policy_digest(run, spec, used),
        updates="not known any more" if used.micro_batches is None else used.micro_batches,
        tokens="none" if drafting is None else f"{drafting.tokens.total:,}",
        heard=_heard(drafter_state),
        accept=_accept(drafter_state),
        architecture=used.architecture,
        digest=used.weights.digest,
        algorithm="EAGLE" if layout == "eagle" else "EAGLE3",
    )


def _accept(drafter_state: DrafterTrainingState) -> str:
    mark = _mark(drafter_state)
    if mark is None:
        return "accept length not measured lately"
    return f"accept length {mark.trained:.2f} at depth 6 on held-out answers"


def _heard(drafter_state: DrafterTrainingState) -> str:
    asked = sorted(drafter_state.heard.items(), key=lambda each: int(each[0].split()[0]))
    told = [f"{a.tokens / a.rows:.2f} at depth {way}" for way, a in asked if a.rows]
    return ", ".join(told) or "not asked yet"


def _policy_digest(run: Path, spec: JobSpec, used: DrafterRef) -> str:
    for entry in entries(run):
        event = entry.event
        if isinstance(event, PolicyPublished) and event.policy.version == used.policy:
            assert event.policy.weights is not None
            return event.policy.weights.digest
    digest = hashlib.blake2b(digest_size=20)
    for file in sorted(Path(spec.policy.path).glob("*.safetensors")):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    return digest.hexdigest()


def _mark(drafter_state: DrafterTrainingState) -> Mark | None:
    """Of the drafter in use; the last marks only are kept."""
    used = drafter_state.used
    found = [m for m in drafter_state.marks if used is not None and m.version == used.version]
    return found[-1] if found else None
