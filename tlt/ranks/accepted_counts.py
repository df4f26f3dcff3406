"""Count the steps of an answer by the number of drafts that they accepted."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from tlt.base.id_types import DrafterVersion
from tlt.protocol.refs import AcceptedCounts, DrafterSpan, OriginSpan


def count_accepted(
    origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan] = ()
) -> tuple[AcceptedCounts, ...]:
    """Count each drafter's steps: a step ends with a token of the policy, or with its turn."""
    found: defaultdict[DrafterVersion | None, Counter[int]] = defaultdict(Counter)
    accepted, version = 0, None
    for origin, tokens, version in _split(origins, drafters):
        match origin:
            case "accepted":
                accepted += tokens
            case "corrected":
                steps = found[version]
                steps[accepted] += 1
                steps[0] += tokens - 1
                accepted = 0
            case "environment" if accepted:
                found[version][accepted] += 1
                accepted = 0
            case _:
                accepted = 0
    if accepted:
        found[version][accepted] += 1
    return tuple(
        AcceptedCounts(drafter=drafter, steps=tuple(steps[n] for n in range(max(steps) + 1)))
        for drafter, steps in found.items()
    )


def _split(
    origins: Iterable[OriginSpan], drafters: Sequence[DrafterSpan]
) -> Iterator[tuple[str, int, DrafterVersion | None]]:
    """Split the spans where the drafter changes; yield origin, tokens and drafter of each piece."""
    version = drafters[-1].version if drafters else None
    if len(drafters) < 2:
        yield from ((span.origin, span.tokens, version) for span in origins)
        return
    following = iter(drafters)
    drafter = next(following)
    room = drafter.tokens
    for span in origins:
        if span.origin == "environment":
            yield span.origin, span.tokens, drafter.version
            continue
        left = span.tokens
        while left > room:
            if room:
                yield span.origin, room, drafter.version
            left -= room
            if (successor := next(following, None)) is None:
                break
            drafter, room = successor, successor.tokens
        if left:
            yield span.origin, left, drafter.version
        room = max(0, room - left)
