"""The inputs of a simulation: how long answers are, and what decoding and updates cost."""

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from tlt.errors import ConfigError
from tlt.spec.section import Section, require

# rows of a decode step, and a quantity of that step
Curve = dict[float, float]


class LengthSpec(Section, frozen=True, kw_only=True):
    """Set log-normal lengths of answers; `rollout.max_new_tokens` cuts them off."""

    # Median tokens of an answer.
    median: float
    # Standard deviation of the logarithm of the tokens.
    sigma: float
    # Share of that variance that the answers to one prompt have in common.
    shared: float = 0.5

    def __post_init__(self) -> None:
        require(self.median >= 1, "median must be at least 1")
        require(self.sigma >= 0, "sigma must be 0 or more")
        require(0 <= self.shared <= 1, "shared must lie in [0, 1]")


class DraftCosts(Section, frozen=True, kw_only=True):
    """Set what one strategy of speculation costs and gains, by the rows of a step."""

    # Seconds of a step that proposes and verifies.
    seconds: Curve
    # Tokens that a row gains by such a step: the accept length.
    tokens: Curve

    def __post_init__(self) -> None:
        _require_curve("seconds", self.seconds)
        _require_curve("tokens", self.tokens)


class EngineCosts(Section, frozen=True, kw_only=True):
    """Set what a decode step of one worker costs; between two numbers of rows it is linear."""

    # Seconds of a step without speculation, by its rows.
    plain: Curve
    # More seconds of a step for each token that its rows have in the cache.
    cached_token: float = 0.0
    # Seconds to read a token of a prompt, or of an answer that is resumed.
    prefill_token: float = 0.0
    # Tokens of a prompt.
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        _require_curve("plain", self.plain)
        for name in ("cached_token", "prefill_token", "prompt_tokens"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more")


class UpdateCosts(Section, frozen=True, kw_only=True):
    """Set what a policy update costs."""

    # Seconds of a token of an answer on one worker; workers share the tokens.
    token: float = 0.0
    # Seconds of each step that more workers don't shorten: publishing weights, coordination.
    seconds: float = 0.0

    def __post_init__(self) -> None:
        require(self.token >= 0, "token must be 0 or more")
        require(self.seconds >= 0, "seconds must be 0 or more")

    def seconds_of(self, tokens: int, workers: int) -> float:
        return self.seconds + self.token * tokens / workers


class CostFile(Section, frozen=True, kw_only=True):
    """Describe answers and costs; what is absent is taken from a run."""

    # Lengths of answers.
    lengths: LengthSpec | None = None
    # Decoding without speculation.
    engine: EngineCosts | None = None
    # Strategies of speculation: each decode step uses the fastest, or none.
    drafts: tuple[DraftCosts, ...] | None = None
    # Policy updates.
    update: UpdateCosts | None = None


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    # log-normal, or the recorded groups of a run
    lengths: LengthSpec | tuple[tuple[int, ...], ...]
    engine: EngineCosts
    drafts: tuple[DraftCosts, ...] = ()
    update: UpdateCosts


def combine(file: CostFile, run: Inputs | None) -> Inputs:
    """Return what the file says, and the rest from the run."""
    lengths, engine, update = file.lengths, file.engine, file.update
    if run is not None:
        lengths, engine, update = lengths or run.lengths, engine or run.engine, update or run.update
    if lengths is None or engine is None or update is None:
        raise ConfigError(
            "--costs must have the sections lengths, engine and update; or take them from a run by "
            "--from-run"
        )
    drafts = file.drafts if file.drafts is not None or run is None else run.drafts
    return Inputs(lengths=lengths, engine=engine, drafts=drafts or (), update=update)


def interpolate(curve: Mapping[float, float], rows: float) -> float:
    """Return the value at some rows, linear between those known.

    Beyond the largest a rise goes on, and there is no fall.
    """
    known = sorted(curve)
    if len(known) == 1 or rows <= known[0]:
        return curve[known[0]]
    high = min(bisect_right(known, rows), len(known) - 1)
    below, above = known[high - 1], known[high]
    share = (rows - below) / (above - below)
    value = curve[below] + share * (curve[above] - curve[below])
    return value if rows <= above else max(value, curve[above])


def _require_curve(name: str, curve: Mapping[float, float]) -> None:
    require(len(curve) > 0, f"{name} must have a value for some number of rows")
    for rows, value in curve.items():
        require(rows >= 1, f"{name}: rows must be 1 or more")
        require(value > 0, f"{name}: {rows:g}: must be above 0")
