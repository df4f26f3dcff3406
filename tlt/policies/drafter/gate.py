"""When workers train the drafter, and which drafter is used: seconds saved against seconds spent.

What is saved is the rollouts' time in the steps that are left, shorter by what the learning curve
predicts. Idle seconds cost what they slow down beside them; bought ones cost themselves.
"""

import math
from collections.abc import Sequence

import msgspec

from tlt.config import JobSpec
from tlt.ids import NAMED, Step
from tlt.policies.drafter import speedup_model
from tlt.policies.drafter.learning_curve import MOST_MARKS, Curve, Mark, curve, going_on, lifted
from tlt.policies.drafter.live_acceptance import accept_length, lately
from tlt.policies.drafter.training_state import DrafterTrainingState
from tlt.protocol.records import DrafterEvaluation, StrategyTally
from tlt.protocol.refs import DrafterBase

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
EVALUATION_DEPTH = 6
# of accept length, before one drafter counts as better than another
_BETTER = 1.01
_WORSE = 0.9
# in a row that training may be in vain; then it rests, for twice as many steps each time
_PATIENCE = 2
_LONGEST_REST = 8
# the accept length of a drafter that the spec names, before it is measured
_NAMED = 3.0
_UNMEASURED = {False: curve(None, ()), True: curve(_NAMED, ())}


class TrainingOutlook(msgspec.Struct, frozen=True, kw_only=True):
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
) -> TrainingOutlook:
    """`steps`: rounds of answers that are still to be opened."""
    return TrainingOutlook(
        steps=max(0, steps),
        seconds=max(0.0, rolled_seconds),
        members=members,
        undrafted=undrafted,
        most=most,
        idle=idle,
    )


def worth_training(
    spec: JobSpec, drafter_state: DrafterTrainingState, ahead: TrainingOutlook, step: Step
) -> Verdict:
    """Idle seconds: as long a stretch as pays best."""
    if spec.drafter.train != "auto":
        worth = spec.drafter.train == "always"
        return Verdict(worth=worth, saved=0.0, cost=0.0, why=f"train: {spec.drafter.train}")
    if step < drafter_state.rest_until:
        return _rests(drafter_state)
    expected = _hoped(spec, drafter_state)
    verdicts: list[Verdict] = []
    for updates in _STRETCHES:
        saved = ahead.steps * _saved_in_a_step(expected, 0.0, updates, ahead)
        cost = _SLOWED * updates / _rate(drafter_state)
        why = f"accept length {expected.now:.2f} now, {expected.after(updates):.2f} expected"
        verdicts.append(Verdict(worth=saved > cost, saved=saved, cost=cost, why=why))
    return max(verdicts, key=lambda verdict: verdict.saved - verdict.cost)


def purchase(
    spec: JobSpec, drafter_state: DrafterTrainingState, ahead: TrainingOutlook, step: Step
) -> Verdict:
    """Seconds of all workers: as many as pay best; `cost` of them, or none."""
    best = Verdict(worth=False, saved=0.0, cost=0.0, why="nothing pays")
    if spec.drafter.train != "auto":
        return best
    if step < drafter_state.rest_until:
        return _rests(drafter_state)
    if spec.drafter.path is not None and not drafter_state.marks:
        why = "the named drafter was not measured yet"
        return Verdict(worth=False, saved=0.0, cost=0.0, why=why)
    expected = _curve(spec, drafter_state)
    rate = ahead.members * _rate(drafter_state) * (_MERGED if ahead.members > 1 else 1.0)
    for seconds in _PURCHASES:
        updates = min(seconds * rate, ahead.most)
        saved = _saved_beside_idling(expected, updates, ahead)
        if saved > _MARGIN * seconds and saved - seconds > best.saved - best.cost:
            after = expected.after(updates)
            why = f"accept length {expected.now:.2f} now, {after:.2f} expected"
            best = Verdict(worth=True, saved=saved, cost=seconds, why=why)
    return best


def to_learn(drafter_state: DrafterTrainingState) -> float:
    """Micro-batches, until all answers were read as often as is worth seconds that are bought."""
    heard = drafter_state.updates > 0 and drafter_state.read > 0
    rows = drafter_state.read / drafter_state.updates if heard else _USUAL_ROWS
    return max(0.0, _READINGS * drafter_state.tokens - drafter_state.read) / rows


def taught_idly(drafter_state: DrafterTrainingState, steps: int) -> float:
    """Micro-batches a step, in so many of them."""
    return drafter_state.idle_updates / max(1, steps)


def counts(evaluation: DrafterEvaluation) -> bool:
    """Whether anything was measured."""
    return evaluation.answers > 0 and math.isfinite(evaluation.trained)


def adopts(evaluation: DrafterEvaluation) -> bool:
    return counts(evaluation) and evaluation.trained > _BETTER * (evaluation.used or 1.0)


def spoiled(evaluation: DrafterEvaluation) -> bool:
    """What was trained is so much worse than what is used that it had better begin there again."""
    return (
        counts(evaluation)
        and evaluation.used is not None
        and evaluation.trained < _WORSE * evaluation.used
    )


def noted(
    drafter_state: DrafterTrainingState,
    evaluation: DrafterEvaluation,
    base: DrafterBase,
    step: Step,
) -> DrafterTrainingState:
    """After a canary."""
    if not counts(evaluation):
        return drafter_state
    mark = Mark(
        version=base.version,
        updates=base.micro_batches,
        used=evaluation.used,
        trained=evaluation.trained,
    )
    began = drafter_state.began if drafter_state.marks else evaluation.used
    marks = (*drafter_state.marks, mark)[-MOST_MARKS:]
    after = msgspec.structs.replace(
        drafter_state,
        marks=marks,
        began=began,
        expected=curve(began, marks),
        measured=_answered(drafter_state),
    )
    if adopts(evaluation):
        return msgspec.structs.replace(after, vain=0, rest_until=step)
    return in_vain(after, step)


def overheard(
    drafter_state: DrafterTrainingState, tallies: Sequence[StrategyTally]
) -> DrafterTrainingState:
    """Before any canary, rollouts tell what the drafter that the job names comes to."""
    if drafter_state.marks or drafter_state.used is not None:
        return drafter_state
    recent = lately(drafter_state.lately, tallies, NAMED)
    after = msgspec.structs.replace(drafter_state, lately=recent)
    return reckoned(after) if after.expected is None else after


def reckoned(drafter_state: DrafterTrainingState) -> DrafterTrainingState:
    """By what was overheard lately, and by the most that it has ever been."""
    if drafter_state.marks or drafter_state.used is not None:
        return drafter_state
    length = accept_length(drafter_state.lately, EVALUATION_DEPTH)
    if length is None:
        return drafter_state
    best = max(length, drafter_state.began or 1.0)
    expected = curve(best, ())
    now = min(length, expected.plateau)
    return msgspec.structs.replace(
        drafter_state, began=best, expected=msgspec.structs.replace(expected, now=now)
    )


def in_vain(drafter_state: DrafterTrainingState, step: Step) -> DrafterTrainingState:
    """Who trains in vain tries less and less often."""
    vain = drafter_state.vain + 1
    more = vain - _PATIENCE - 1
    rest = 0 if more < 0 else min(_LONGEST_REST, 2 ** min(more, _LONGEST_REST))
    return msgspec.structs.replace(drafter_state, vain=vain, rest_until=Step(step + rest))


def gone_back(drafter_state: DrafterTrainingState, step: Step) -> DrafterTrainingState:
    """To what is in use now: what was measured of later drafters says nothing of it."""
    newest = drafter_state.version_in_use
    marks = tuple(mark for mark in drafter_state.marks if mark.version <= newest)
    began = drafter_state.began if marks else None
    expected = curve(began, marks) if marks else None
    before = msgspec.structs.replace(drafter_state, marks=marks, began=began, expected=expected)
    return in_vain(before, step)


def rested(drafter_state: DrafterTrainingState, step: Step) -> DrafterTrainingState:
    """Where nothing that is learned can be kept."""
    return msgspec.structs.replace(drafter_state, rest_until=Step(step + _LONGEST_REST))


def _rests(drafter_state: DrafterTrainingState) -> Verdict:
    why = f"rests until step {drafter_state.rest_until}"
    return Verdict(worth=False, saved=0.0, cost=0.0, why=why)


def _curve(spec: JobSpec, drafter_state: DrafterTrainingState) -> Curve:
    return drafter_state.expected or _UNMEASURED[spec.drafter.path is not None]


def _hoped(spec: JobSpec, drafter_state: DrafterTrainingState) -> Curve:
    """Seconds that cost little may find out whether the curve has ended; bought ones may not."""
    expected = going_on(_curve(spec, drafter_state), drafter_state.marks)
    new_answers = drafter_state.marks and _answered(drafter_state) > drafter_state.measured
    return lifted(expected) if new_answers else expected


def _answered(drafter_state: DrafterTrainingState) -> Step:
    """The last step that has answers to learn from: in an evaluation, the one before it."""
    return max(drafter_state.held_out, default=Step(0))


def _rate(drafter_state: DrafterTrainingState) -> float:
    if drafter_state.updates == 0 or drafter_state.seconds <= 0.0:
        return _USUAL_RATE
    return drafter_state.updates / drafter_state.seconds


def _saved_beside_idling(expected: Curve, updates: float, ahead: TrainingOutlook) -> float:
    """Idle seconds teach as well: where they do, what is bought is only ahead of its time."""
    places = min(ahead.steps, _PLACES)
    idly = (ahead.idle * ahead.steps * (place + 0.5) / places for place in range(places))
    return sum(
        ahead.steps / places * _saved_in_a_step(expected, before, updates, ahead) for before in idly
    )


def _saved_in_a_step(
    expected: Curve, before: float, updates: float, ahead: TrainingOutlook
) -> float:
    """By so many micro-batches that come after so many others."""
    now, without, then = (
        max(ahead.undrafted, speedup_model.with_drafter(expected.after(count)))
        for count in (0.0, before, before + updates)
    )
    return ahead.seconds * (now / without - now / then)
