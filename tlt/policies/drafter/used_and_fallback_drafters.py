"""The drafter that engines propose with, and the earlier ones that may replace it again."""

from collections.abc import Iterable, Sequence

import msgspec

from tlt.base.id_types import NAMED, DrafterVersion, Incarnation
from tlt.policies.drafter.live_acceptance import LiveAcceptance, add_tallies, is_known
from tlt.protocol.refs import DrafterRef
from tlt.protocol.shared_values import StrategyTally


class Adoption(msgspec.Struct, frozen=True, kw_only=True):
    # None: the drafter that the spec names, if it names one
    used: DrafterRef | None = None
    # the drafter before `used`, which replaces it if it can't be loaded or committed
    previous: DrafterRef | None = None
    # the last drafter with known live acceptance, which replaces `used` if that does much worse
    fallback: DrafterRef | None = None
    live: LiveAcceptance = {}
    fallback_live: LiveAcceptance = {}
    # by version: incarnations that couldn't load it, and decode without it or with an older one
    refused_by: dict[DrafterVersion, tuple[Incarnation, ...]] = {}

    @property
    def version_in_use(self) -> DrafterVersion:
        return NAMED if self.used is None else self.used.version


def adopt(adoption: Adoption, drafter: DrafterRef, live_now: LiveAcceptance) -> Adoption:
    """Use a new drafter; `live_now` is the earlier one's live acceptance under this policy."""
    known = is_known(adoption.live)
    return msgspec.structs.replace(
        adoption,
        used=drafter,
        previous=adoption.used,
        fallback=adoption.used if known else adoption.fallback,
        live={},
        fallback_live=live_now if known else adoption.fallback_live,
    )


def use_earlier(adoption: Adoption, drafter: DrafterRef | None) -> Adoption:
    return msgspec.structs.replace(
        adoption, used=drafter, previous=None, fallback=None, live={}, fallback_live={}
    )


def forget_uncommitted(adoption: Adoption, version: DrafterVersion) -> Adoption:
    """Never revert to a drafter that isn't in the run's folder."""
    if adoption.fallback is not None and adoption.fallback.version == version:
        adoption = msgspec.structs.replace(adoption, fallback=None, fallback_live={})
    if adoption.previous is not None and adoption.previous.version == version:
        adoption = msgspec.structs.replace(adoption, previous=None)
    return adoption


def record_live(adoption: Adoption, tallies: Sequence[StrategyTally]) -> Adoption:
    live = add_tallies(adoption.live, tallies, adoption.version_in_use)
    return msgspec.structs.replace(adoption, live=live)


def add_refusal(adoption: Adoption, version: DrafterVersion, incarnation: Incarnation) -> Adoption:
    refused = tuple(sorted({*adoption.refused_by.get(version, ()), incarnation}))
    return msgspec.structs.replace(adoption, refused_by={**adoption.refused_by, version: refused})


def retry_loading(adoption: Adoption, incarnation: Incarnation) -> Adoption:
    """Forget a refusal of the drafter in use by an incarnation that is about to load it again."""
    used, refused = adoption.used, adoption.refused_by
    if used is None or incarnation not in refused.get(used.version, ()):
        return adoption
    others = tuple(other for other in refused[used.version] if other != incarnation)
    return msgspec.structs.replace(adoption, refused_by={**refused, used.version: others})


def refusers(adoption: Adoption) -> tuple[Incarnation, ...]:
    """Return the incarnations that couldn't load the drafter in use."""
    return adoption.refused_by.get(adoption.version_in_use, ())


def is_refused_by_all(adoption: Adoption, incarnations: Iterable[Incarnation]) -> bool:
    refused = refusers(adoption)
    return all(incarnation in refused for incarnation in incarnations)


def lacks_drafter(
    adoption: Adoption, incarnation: Incarnation, incarnations: Iterable[Incarnation]
) -> bool:
    """Return True if others propose with a drafter that this incarnation couldn't load.

    If no worker can load the drafter that the spec names, all decode alike and none lacks it.
    """
    if incarnation not in refusers(adoption):
        return False
    return adoption.used is not None or not is_refused_by_all(adoption, incarnations)
