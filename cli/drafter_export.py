"""The by-product of a run: the drafter that it used last, with a card that says what it is."""

from pathlib import Path

from cli.export import whole_or_not
from tlt.blobs import Blobs
from tlt.config import JobSpec
from tlt.errors import BlobError, ConfigError
from tlt.learn.drafter.beginning import config_for
from tlt.messages import DrafterRef
from tlt.models.config_file import read_config
from tlt.models.drafter import Drafter, new_drafter
from tlt.models.drafter_folder import load_drafter, save_drafter
from tlt.models.weights import read_weights
from tlt.policies.learning_curve import Mark
from tlt.policies.ledger import Ledger
from tlt.policies.schooling import Schooling

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
| micro-batches | {updates} |
| accept length | {accept} |
| architecture digest | `{architecture}` |
| weights digest (BLAKE2b) | `{digest}` |

Serve it with SGLang: `--speculative-algorithm {algorithm}`,
`--speculative-draft-model-path THIS_FOLDER`.
Begin another TLT job with it: `drafter: {{path: THIS_FOLDER}}`.
"""


def write_drafter(run: Path, ledger: Ledger, job: str, folder: Path) -> str:
    schooling, spec = ledger.schooling, ledger.spec
    if schooling.used is None:
        raise ConfigError(f"{job}: it has used no drafter of its own making yet")
    drafter = read_drafter(run, spec, schooling.used)
    with whole_or_not(folder) as unfinished:
        save_drafter(drafter, unfinished)
        card = _card(job, spec, schooling, schooling.used, drafter)
        (unfinished / "README.md").write_text(card)
    return f"drafter of {job}, version {schooling.used.version}, {_accept(schooling)}"


def read_drafter(run: Path, spec: JobSpec, used: DrafterRef) -> Drafter:
    """One that the run has used."""
    policy = read_config(Path(spec.policy.path))
    if spec.drafter.path is not None:
        drafter = load_drafter(Path(spec.drafter.path), policy.layers)
    else:
        drafter = new_drafter(config_for(policy, spec.drafter.layout))
    try:
        weights = read_weights(Blobs(run / "blobs", run / "blobs"), used.weights)
        drafter.load_state_dict({**drafter.state_dict(), **weights})
    except (BlobError, RuntimeError) as error:
        raise ConfigError(f"{run}: the drafter cannot be read: {error}") from error
    return drafter


def _card(job: str, spec: JobSpec, schooling: Schooling, used: DrafterRef, drafter: Drafter) -> str:
    layout, mark = drafter.config.layout, _mark(schooling)
    return _CARD.format(
        job=job,
        policy=Path(spec.policy.path).name,
        layout=layout,
        version=used.policy,
        updates="not known any more" if mark is None else mark.updates,
        accept=_accept(schooling),
        architecture=used.architecture,
        digest=used.weights.digest,
        algorithm="EAGLE" if layout == "eagle" else "EAGLE3",
    )


def _accept(schooling: Schooling) -> str:
    mark = _mark(schooling)
    if mark is None:
        return "accept length not measured lately"
    return f"accept length {mark.trained:.2f} at depth 6 on held-out answers"


def _mark(schooling: Schooling) -> Mark | None:
    """Of the drafter in use; the last marks only are kept."""
    used = schooling.used
    found = [m for m in schooling.marks if used is not None and m.version == used.version]
    return found[-1] if found else None
