"""The inputs of a simulation: how long answers are, and what decoding and updates cost."""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tlt.base.id_types import Count
from tlt.errors import ConfigError
from tlt.spec.section import Section

# rows of a decode step, and a quantity of that step
Curve = dict[Annotated[float, Meta(ge=1)], Annotated[float, Meta(gt=0)]]
_Curve = Annotated[Curve, Meta(min_length=1)]
_NotNegative = Annotated[float, Meta(ge=0)]


class LengthSpec(Section, frozen=True, kw_only=True):
    """Set log-normal lengths of answers; `rollout.max_new_tokens` cuts them off."""

    # Median tokens of an answer.
    median: Annotated[float, Meta(ge=1)]
    # Standard deviation of the logarithm of the tokens.
    sigma: _NotNegative
    # Share of that variance that the answers to one prompt have in common.
    shared: Annotated[float, Meta(ge=0, le=1)] = 0.5


class DraftCosts(Section, frozen=True, kw_only=True):
    """Set what one strategy of speculation costs and gains, by the rows of a step."""

    # Seconds of a step that proposes and verifies.
    seconds: _Curve
    # Tokens that a row gains by such a step: the accept length.
    tokens: _Curve


class EngineCosts(Section, frozen=True, kw_only=True):
    """Set what a decode step of one worker costs; between two numbers of rows it is linear."""

    # Seconds of a step without speculation, by its rows.
    plain: _Curve
    # More seconds of a step for each token that its rows have in the cache.
    cached_token: _NotNegative = 0.0
    # Seconds to read a token of a prompt, or of an answer that is resumed.
    prefill_token: _NotNegative = 0.0
    # Tokens of a prompt.
    prompt_tokens: Count = 0


class UpdateCosts(Section, frozen=True, kw_only=True):
    """Set what a policy update costs."""

    # Seconds of a token of an answer on one worker; workers share the tokens.
    token: _NotNegative = 0.0
    # Seconds of each step that more workers don't shorten: publishing weights, coordination.
    seconds: _NotNegative = 0.0

    def seconds_of(self, tokens: int, workers: int) -> float:
        return self.seconds + self.token * tokens / workers


class Inputs(Section, frozen=True, kw_only=True):
    """Describe answers and costs."""

    # Lengths of answers, or the recorded groups of a run.
    lengths: LengthSpec | tuple[tuple[int, ...], ...]
    # Decoding without speculation.
    engine: EngineCosts
    # Strategies of speculation: each decode step uses the fastest, or none.
    drafts: tuple[DraftCosts, ...] = ()
    # Policy updates.
    update: UpdateCosts


def combine(file: Mapping[str, Any], run: Inputs | None) -> Inputs:
    """Return the sections of a file, and those that it lacks from a run."""
    sections = {**({} if run is None else msgspec.structs.asdict(run)), **file}
    try:
        return msgspec.convert(sections, Inputs, strict=False)
    except msgspec.ValidationError as error:
        needed = "; it needs the sections lengths, engine and update, or else --from-run"
        raise ConfigError(f"--costs: {error}{'' if run else needed}") from error


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
