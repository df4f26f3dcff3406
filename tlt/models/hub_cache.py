"""Find a policy of the Hugging Face Hub: in this host's cache, or by downloading what it lacks.

Without a network, or with HF_HUB_OFFLINE=1, the cache alone counts. Errors name policy.path.
"""

import json
import re
from pathlib import Path

from tlt.errors import ConfigError
from tlt.protocol.shared_values import HubPolicy
from tlt.spec.config import PolicySpec

_DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "*.txt", "README.md")
_WEIGHTS = "*.safetensors"
_COMMIT = re.compile(r"[0-9a-f]{40}")
# folders hold other formats, and such files the same weights once more
_IGNORED = ("*/*", "consolidated*")


def find_hub_policy(policy: PolicySpec, *, weights: bool = True) -> HubPolicy | None:
    """Return a policy's commit and its folder; None if the spec names a folder itself."""
    if policy.hub_id is None:
        return None
    folder = _cached_commit(policy.hub_id, policy.revision or "")
    folder = folder or _fetch(policy.hub_id, policy.revision, weights)
    complaint = _complain_of_weights(folder) if weights else None
    if complaint is not None:
        raise ConfigError(
            f"policy.path: {policy.hub_id} {complaint}; it was looked for in {folder}"
        )
    return HubPolicy(
        id=policy.hub_id, revision=policy.revision, commit=folder.name, folder=str(folder)
    )


def _cached_commit(name: str, revision: str) -> Path | None:
    """Return the folder of a commit that is whole in the cache: the Hub need not be asked."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / revision
    if not _COMMIT.fullmatch(revision) or not (folder / "config.json").is_file():
        return None
    return folder.absolute() if _complain_of_weights(folder) is None else None


def _fetch(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    what = name if revision is None else f"{name} at {revision}"
    patterns = [*_DESCRIPTIONS, _WEIGHTS] if weights else [*_DESCRIPTIONS]
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=patterns, ignore_patterns=[*_IGNORED]
        )
    except errors.GatedRepoError as error:
        complaint = f"is gated: ask for access at {_page(name)}, and set HF_TOKEN for the session"
        raise ConfigError(f"policy.path: {name} {complaint}") from error
    except errors.RepositoryNotFoundError as error:
        complaint = "is neither a folder nor a model of the Hub; of a private one, set HF_TOKEN"
        raise ConfigError(f"policy.path: {name} {complaint} for the session") from error
    except errors.RevisionNotFoundError as error:
        complaint = f"has no revision '{revision}' (policy.revision): {_page(name)} lists them"
        raise ConfigError(f"policy.path: {name} {complaint}") from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub can't be reached"
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        raise ConfigError(
            f"policy.path: {what} is no folder, nor whole in the cache {constants.HF_HUB_CACHE}, "
            f"and {why}: `{command}` fills the cache, and HF_HOME of the session says where it is"
        ) from error
    except Exception as error:  # a proxy that refuses, or a transfer that breaks off
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"policy.path: {what} cannot be downloaded: {text}") from error
    return Path(found).absolute()


def _page(name: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{name}"


def _complain_of_weights(folder: Path) -> str | None:
    """Say what the folder lacks: a cache that was filled without a network may lack anything."""
    there = {file.name for file in folder.glob(_WEIGHTS) if file.is_file()}
    if not there:
        return f"has no {_WEIGHTS}, the only weights that TLT reads"
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        listed = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has an unreadable {index.name}"
    missing = sorted(map(str, listed - there))
    return f"lacks {', '.join(missing)}" if missing else None
