"""The section of a spec that says how answers are scored.

The comment above a field describes it in docs/spec.md, which docs/generate.py writes.
"""

import math
import re
from collections.abc import Collection
from typing import Literal

import msgspec

from tlt.base.id_types import LARGEST
from tlt.spec.section import Section, require

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
# by kind: the key that it needs, and how a complaint names it
_NEEDED = {
    "regex": ("pattern", "a pattern"),
    "function": ("function", "function: package.module:name"),
    "url": ("url", "a url"),
    "model": ("path", "a path"),
}
# kinds that compare what the answer says in the end, on which answers can agree
EXTRACTING = ("final_answer", "numeric", "math", "regex", "boxed", "reasoning_gym")
_BUILT_IN = (*EXTRACTING, "code")
# kinds that may run what a model has written
SANDBOXED = ("code", "reasoning_gym")


class RewardSpec(Section, frozen=True, kw_only=True):
    """Choose how an answer is scored; with a list of rewards their weighted sum counts."""

    # Built-in verifier (1 if right, else 0), a function of yours, a judge behind a URL, a reward
    # model, or the job's environment. `code` runs a program against tests, in a sandbox of Linux's
    # namespaces and Landlock; `reasoning_gym` scores there as the row's task does.
    kind: Literal[
        "final_answer",
        "numeric",
        "math",
        "regex",
        "boxed",
        "code",
        "reasoning_gym",
        "function",
        "url",
        "model",
        "environment",
    ]
    # Name in metrics; the kind if absent.
    name: str | None = None
    # Score only answers to prompts of these sources or evaluation sets, by name; all if absent.
    sources: tuple[str, ...] | None = None
    # Factor in the sum of several rewards.
    weight: float = 1.0
    # An answer is right where this reward, without its weight, gives at least so much; 1 for the
    # built-in verifiers if absent. Of several such rewards all have to; without one, 1 in all.
    correct_at: float | None = None
    # `final_answer` compares the text after the last marker.
    marker: str = "#"
    # `regex` compares the first group of the pattern's last match.
    pattern: str | None = None
    # `numeric` compares the last number of each, 2 in 1/2, and accepts this relative error.
    tolerance: float = 1e-6
    # `code` gives the share of the tests that pass, instead of 1 if all do.
    partial: bool = False
    # Your function, as `package.module:name` or `file.py:name`.
    function: str | None = None
    # `url` posts completion, answer and row there as JSON, and expects `{"reward": 0.5}`.
    url: str | None = None
    # Environment variable whose value `url` sends as a bearer token.
    token_variable: str | None = None
    # Folder of a `model`: a sequence classifier with one label, in Hugging Face's layout.
    path: str | None = None
    # Device of a `model`, such as `cpu` or `cuda:1`; the session's kind of device if absent.
    device: str | None = None
    # Number format in which a `model` computes; `auto` is bfloat16 on GPUs, float32 on CPUs.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    # Most tokens that a `model` reads, the last of a longer conversation; its own limit if absent.
    max_length: int | None = None
    # Most tokens of a pass of a `model`, padding included.
    batch_tokens: int = 16384
    # Let a `model` give the sigmoid of its score, which lies between 0 and 1.
    sigmoid: bool = False
    # An answer that takes longer to score is an error; a `model` has as much for each of a batch.
    timeout_seconds: float = 10.0
    # Reward where scoring fails, times out or gives NaN; such answers are left out if absent.
    on_error: float | None = None
    # Answers scored at once, or copies of a `model` (1 if absent); otherwise
    # `tlt up --reward-workers` says how many if absent.
    workers: int | None = None
    # Most answers that a function of `completions` or a `model` gets at once.
    batch_size: int = 32
    # Memory of a process that scores, but of a `model`; what asks for more gets a MemoryError.
    memory_gb: float = 2.0
    # Let a function use the network.
    network: bool = False
    # `required` refuses a function where the host lacks namespaces or Landlock; `available` runs it
    # with the limits that the host has.
    isolation: Literal["required", "available"] = "required"
    # Folders that a function may write to beside its own.
    writable: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        needed = _NEEDED.get(self.kind)
        if needed is not None:
            key, what = needed
            require(getattr(self, key) is not None, f"kind {self.kind} needs {what}")
        require(
            self.url is None or "@" not in _authority(self.url),
            "url must hold no user and no password: they would be shown; see token_variable",
        )
        require(self.name is None or self.name != "", "name must not be empty")
        require(self.sources != (), "sources must not be empty")
        require(math.isfinite(self.weight), "weight must be a finite number")
        require(
            self.correct_at is None or math.isfinite(self.correct_at),
            "correct_at must be a finite number",
        )
        require(self.marker != "", "marker must not be empty")
        require(self.tolerance >= 0, "tolerance must be 0 or more")
        require(0 < self.timeout_seconds < math.inf, "timeout_seconds must be above 0 and finite")
        require(
            self.on_error is None or abs(self.on_error) <= LARGEST,
            "on_error must lie within ±1e100",
        )
        require(self.workers is None or self.workers > 0, "workers must be above 0")
        require(self.batch_size > 0, "batch_size must be above 0")
        require(self.batch_tokens > 0, "batch_tokens must be above 0")
        require(self.max_length is None or self.max_length > 0, "max_length must be above 0")
        require(
            self.device is None or _DEVICE.fullmatch(self.device) is not None,
            "device is cpu, cuda or cuda:N",
        )
        require(0 < self.memory_gb < math.inf, "memory_gb must be above 0 and finite")

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def least_correct(self) -> float | None:
        """Return what it gives to a right answer at least; None if it doesn't decide on that."""
        if self.correct_at is None and self.kind in _BUILT_IN:
            return 1.0
        return self.correct_at

    def applies_to(self, sources: Collection[str] | None) -> bool:
        """Return True if it scores what has these names; what has none can be anything."""
        return self.sources is None or sources is None or not set(sources).isdisjoint(self.sources)

    def on_device(self, device: str) -> "RewardSpec":
        """Return the same reward, on this device if it names none."""
        return msgspec.structs.replace(self, device=self.device or device)


def _authority(url: str) -> str:
    """Return the part that names the host, and a user and a password."""
    return re.split(r"[/?#]", url.partition("://")[2], maxsplit=1)[0]


def require_distinct(rewards: tuple[RewardSpec, ...]) -> None:
    """Check a spec's rewards together."""
    require(len(rewards) > 0, "reward: the list is empty")
    names = [reward.label for reward in rewards]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"reward: '{twice}' is there twice: give them a name each")
