"""When workers train the drafter, and which drafter is used: seconds saved against seconds spent.

What is saved is the rollouts' time in the steps that are left, shorter by what the learning curve
predicts. Idle seconds cost what they slow down beside them; bought ones cost themselves.
"""

import math
from collections.abc import Sequence

import msgspec

from tlt.config import JobSpec
from tlt.messages import Canary, StrategyTally, TrunkRef
from tlt.policies import pace
from tlt.policies.heard import accept_length, lately
from tlt.policies.learning_curve import MOST_MARKS, Curve, Mark, curve, going_on, lifted
from tlt.policies.schooling import Schooling
from tlt.types import NAMED, Step

# of a second of decoding beside a worker that trains: two models share a cache, or a power limit
_SLOWED = 0.1
# micro-batches of idle seconds: the first few may gain nothing, and many all the same
_STRETCHES = (24, 96, 384)
# micro-batches a second and member, before any was seen
_USUAL_RATE = 10.0
# several members' micro-batches teach less than one member's as many
_MERGED = 0.85
# Bought seconds teach what there is in answers, and read more often than this these teach little:
# with 128 of them, a drafter that came to 2.5 by sixteen readings stayed there, and gained .8 from
# the answers of two further steps.
_READINGS = 15
# rows of a micro-batch, before any was heard of
_USUAL_ROWS = 1024.0
# a purchase must be predicted to save so many times what it costs
_MARGIN = 2.0
_PURCHASES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
# of the steps to come, those that are looked at
_PLACES = 16
# guesses in a row, as canaries count accept lengths
CANARY_DEPTH = 6
# of accept length, before one drafter counts as better than another
_BETTER = 1.01
_WORSE = 0.9
# in a row that training may be in vain; then it rests, for twice as many steps each time
_PATIENCE = 2
_LONGEST_REST = 8
# the accept length of a drafter that the spec names, before it is measured
_NAMED = 3.0
_UNMEASURED = {False: curve(None, ()), True: curve(_NAMED, ())}


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What of the job is still to come, as far as the drafter can make it shorter."""

    steps: int
    # of rolling out in each of them, at today's pace
    seconds: float
    members: int
    # how many times as fast as plain decoding it goes without a drafter
    undrafted: float
    # micro-batches for which there is something to learn
    most: float = math.inf
    # micro-batches a step that cost nothing
    idle: float = 0.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    worth: bool
    # seconds of the job's, predicted
    saved: float
    cost: float
    why: str


def outlook(
    steps: int,
    rolled_seconds: float,
    members: int,
    undrafted: float,
    most: float = math.inf,
    idle: float = 0.0,
) -> Outlook:
    """`steps`: rounds of answers that are still to be opened."""
    return Outlook(
        steps=max(0, steps),
        seconds=max(0.0, rolled_seconds),
        members=members,
        undrafted=undrafted,
        most=most,
        idle=idle,
    )


def worth_training(spec: JobSpec, schooling: Schooling, ahead: Outlook, step: Step) -> Verdict:
    """Idle seconds: as long a stretch as pays best."""
    if spec.drafter.train != "auto":
        worth = spec.drafter.train == "always"
        return Verdict(worth=worth, saved=0.0, cost=0.0, why=f"train: {spec.drafter.train}")
    if step < schooling.rest_until:
        return _rests(schooling)
    expected = _hoped(spec, schooling)
    verdicts: list[Verdict] = []
    for updates in _STRETCHES:
        saved = ahead.steps * _saved_in_a_step(expected, 0.0, updates, ahead)
        cost = _SLOWED * updates / _rate(schooling)
        why = f"accept length {expected.now:.2f} now, {expected.after(updates):.2f} expected"
        verdicts.append(Verdict(worth=saved > cost, saved=saved, cost=cost, why=why))
    return max(verdicts, key=lambda verdict: verdict.saved - verdict.cost)


def purchase(spec: JobSpec, schooling: Schooling, ahead: Outlook, step: Step) -> Verdict:
    """Seconds of all workers: as many as pay best; `cost` of them, or none."""
    best = Verdict(worth=False, saved=0.0, cost=0.0, why="nothing pays")
    if spec.drafter.train != "auto":
        return best
    if step < schooling.rest_until:
        return _rests(schooling)
    if spec.drafter.path is not None and not schooling.marks:
        why = "the named drafter was not measured yet"
        return Verdict(worth=False, saved=0.0, cost=0.0, why=why)
    expected = _curve(spec, schooling)
    rate = ahead.members * _rate(schooling) * (_MERGED if ahead.members > 1 else 1.0)
    for seconds in _PURCHASES:
        updates = min(seconds * rate, ahead.most)
        saved = _saved_beside_idling(expected, updates, ahead)
        if saved > _MARGIN * seconds and saved - seconds > best.saved - best.cost:
            after = expected.after(updates)
            why = f"accept length {expected.now:.2f} now, {after:.2f} expected"
            best = Verdict(worth=True, saved=saved, cost=seconds, why=why)
    return best


def to_learn(schooling: Schooling) -> float:
    """Micro-batches, until all answers were read as often as is worth seconds that are bought."""
    heard = schooling.updates > 0 and schooling.read > 0
    rows = schooling.read / schooling.updates if heard else _USUAL_ROWS
    return max(0.0, _READINGS * schooling.tokens - schooling.read) / rows


def taught_idly(schooling: Schooling, steps: int) -> float:
    """Micro-batches a step, in so many of them."""
    return schooling.idle_updates / max(1, steps)


def counts(canary: Canary) -> bool:
    """Whether anything was measured."""
    return canary.answers > 0 and math.isfinite(canary.trained)


def adopts(canary: Canary) -> bool:
    return counts(canary) and canary.trained > _BETTER * (canary.used or 1.0)


def spoiled(canary: Canary) -> bool:
    """What was trained is so much worse than what is used that it had better begin there again."""
    return counts(canary) and canary.used is not None and canary.trained < _WORSE * canary.used


def noted(schooling: Schooling, canary: Canary, trunk: TrunkRef, step: Step) -> Schooling:
    """After a canary."""
    if not counts(canary):
        return schooling
    mark = Mark(
        version=trunk.version,
        updates=trunk.lessons,
        used=canary.used,
        trained=canary.trained,
    )
    began = schooling.began if schooling.marks else canary.used
    marks = (*schooling.marks, mark)[-MOST_MARKS:]
    after = msgspec.structs.replace(
        schooling,
        marks=marks,
        began=began,
        expected=curve(began, marks),
        measured=_answered(schooling),
    )
    if adopts(canary):
        return msgspec.structs.replace(after, vain=0, rest_until=step)
    return in_vain(after, step)


def overheard(schooling: Schooling, tallies: Sequence[StrategyTally]) -> Schooling:
    """Before any canary, rollouts tell what the drafter that the job names comes to."""
    if schooling.marks or schooling.used is not None:
        return schooling
    recent = lately(schooling.lately, tallies, NAMED)
    after = msgspec.structs.replace(schooling, lately=recent)
    return reckoned(after) if after.expected is None else after


def reckoned(schooling: Schooling) -> Schooling:
    """By what was overheard lately, and by the most that it has ever been."""
    if schooling.marks or schooling.used is not None:
        return schooling
    length = accept_length(schooling.lately, CANARY_DEPTH)
    if length is None:
        return schooling
    best = max(length, schooling.began or 1.0)
    expected = curve(best, ())
    now = min(length, expected.plateau)
    return msgspec.structs.replace(
        schooling, began=best, expected=msgspec.structs.replace(expected, now=now)
    )


def in_vain(schooling: Schooling, step: Step) -> Schooling:
    """Who trains in vain tries less and less often."""
    vain = schooling.vain + 1
    more = vain - _PATIENCE - 1
    rest = 0 if more < 0 else min(_LONGEST_REST, 2 ** min(more, _LONGEST_REST))
    return msgspec.structs.replace(schooling, vain=vain, rest_until=Step(step + rest))


def gone_back(schooling: Schooling, step: Step) -> Schooling:
    """To what is in use now: what was measured of later drafters says nothing of it."""
    newest = schooling.version_in_use
    marks = tuple(mark for mark in schooling.marks if mark.version <= newest)
    began = schooling.began if marks else None
    expected = curve(began, marks) if marks else None
    before = msgspec.structs.replace(schooling, marks=marks, began=began, expected=expected)
    return in_vain(before, step)


def rested(schooling: Schooling, step: Step) -> Schooling:
    """Where nothing that is learned can be kept."""
    return msgspec.structs.replace(schooling, rest_until=Step(step + _LONGEST_REST))


def _rests(schooling: Schooling) -> Verdict:
    why = f"rests until step {schooling.rest_until}"
    return Verdict(worth=False, saved=0.0, cost=0.0, why=why)


def _curve(spec: JobSpec, schooling: Schooling) -> Curve:
    return schooling.expected or _UNMEASURED[spec.drafter.path is not None]


def _hoped(spec: JobSpec, schooling: Schooling) -> Curve:
    """Seconds that cost little may find out whether the curve has ended; bought ones may not."""
    expected = going_on(_curve(spec, schooling), schooling.marks)
    new_answers = schooling.marks and _answered(schooling) > schooling.measured
    return lifted(expected) if new_answers else expected


def _answered(schooling: Schooling) -> Step:
    """The last step that has answers to learn from: in an evaluation, the one before it."""
    return max(schooling.held_out, default=Step(0))


def _rate(schooling: Schooling) -> float:
    if schooling.updates == 0 or schooling.seconds <= 0.0:
        return _USUAL_RATE
    return schooling.updates / schooling.seconds


def _saved_beside_idling(expected: Curve, updates: float, ahead: Outlook) -> float:
    """Idle seconds teach as well: where they do, what is bought is only ahead of its time."""
    places = min(ahead.steps, _PLACES)
    idly = (ahead.idle * ahead.steps * (place + 0.5) / places for place in range(places))
    return sum(
        ahead.steps / places * _saved_in_a_step(expected, before, updates, ahead) for before in idly
    )


def _saved_in_a_step(expected: Curve, before: float, updates: float, ahead: Outlook) -> float:
    """By so many micro-batches that come after so many others."""
    now, without, then = (
        max(ahead.undrafted, pace.with_drafter(expected.after(count)))
        for count in (0.0, before, before + updates)
    )
    return ahead.seconds * (now / without - now / then)
