"""What the drafter's training goes by: what to expect, what that is worth, what to learn from."""

import math
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samples import tally
from tests.simulation.specs import small_spec
from tlt.config import JobSpec
from tlt.ids import DrafterVersion, Member, PromptIndex, Step
from tlt.policies.drafter import gate, speedup_model
from tlt.policies.drafter.data_selection import Candidate, drawn, held_out, is_held_out, least_worth
from tlt.policies.drafter.learning_curve import MOST_MARKS, Mark, curve, going_on, lifted
from tlt.policies.drafter.training_state import DrafterTrainingState
from tlt.policies.speculation.savings_estimate import add_tallies
from tlt.protocol.records import ControlRuns, DrafterEvaluation, StrategyTally
from tlt.protocol.refs import DrafterBase
from tlt.strategies import Draft, Ngram, Off

_lengths = st.floats(1.0, 12.0)
_marks = st.lists(
    st.builds(
        Mark,
        version=st.integers(1, 1000).map(DrafterVersion),
        updates=st.integers(0, 100_000),
        used=st.none() | _lengths,
        trained=_lengths,
    ),
    max_size=60,
)
_START = Step(0)


# --- the learning curve -------------------------------------------------------------------------


@given(
    start=st.none() | _lengths,
    marks=_marks,
    updates=st.lists(st.floats(0.0, 1e9), min_size=2, max_size=6).map(sorted),
)
def test_predictions_rise_from_now_to_the_plateau(
    start: float | None, marks: list[Mark], updates: list[float]
) -> None:
    found = curve(start, marks)
    predicted = [found.after(more) for more in updates]
    assert all(math.isfinite(length) for length in predicted)
    assert all(a <= b + 1e-9 for a, b in pairwise(predicted))
    assert found.now - 1e-9 <= predicted[0]
    assert predicted[-1] <= found.plateau + 1e-9
    assert found.after(0.0) == pytest.approx(found.now)


def _measured(
    began: float, plateau: float, span: float, *, noise: float = 0.0, seed: int = 0, marks: int = 30
) -> list[Mark]:
    dice = Random(seed)
    lengths = [plateau - (plateau - began) * math.exp(-24 * i / span) for i in range(marks + 1)]
    lengths = [max(1.0, length + dice.gauss(0.0, noise)) for length in lengths]
    return [
        Mark(version=DrafterVersion(0), updates=24 * (i + 1), used=used, trained=trained)
        for i, (used, trained) in enumerate(pairwise(lengths))
    ]


@given(
    plateau=st.floats(2.0, 8.0),
    span=st.floats(60.0, 600.0),
    seed=st.integers(0, 10),
    half=st.booleans(),
)
def test_a_curve_is_found_again(plateau: float, span: float, seed: int, half: bool) -> None:
    """What ten more canaries will see, from thirty of them or from half as many."""
    marks = _measured(1.0, plateau, span, noise=0.1, seed=seed)
    seen = marks[: 15 if half else 30]
    left = math.exp(-24 * (len(seen) + 10) / span)
    truth = plateau - (plateau - 1.0) * left
    assert curve(1.0, seen).after(240) == pytest.approx(truth, abs=0.45 + 0.08 * plateau)


@given(length=st.floats(1.5, 6.0), seed=st.integers(0, 10), noise=st.sampled_from([0.0, 0.05]))
def test_a_warm_drafter_that_gets_no_better_is_expected_to_gain_nothing(
    length: float, seed: int, noise: float
) -> None:
    dice = Random(seed)
    marks = [
        Mark(
            version=DrafterVersion(0),
            updates=3000 + 24 * i,
            used=length,
            trained=length + dice.gauss(0.0, noise),
        )
        for i in range(1, 9)
    ]
    found = curve(length, marks)
    assert found.after(24) - found.now < 0.15
    assert found.after(1000) - found.now < 0.35


# a job of 64 answers a step: seven canaries in its first step, one in the fourth, one in the eighth
_FEW_ANSWERS = [
    Mark(version=DrafterVersion(i), updates=updates, used=used, trained=trained)
    for i, (updates, used, trained) in enumerate(
        [
            *((54, None, 1.556), (103, 1.556, 1.798), (152, 1.798, 1.956), (202, 1.956, 2.125)),
            *((252, 2.125, 2.276), (301, 2.276, 2.335), (350, 2.335, 2.48)),
            *((402, 2.13, 2.512), (453, 2.442, 2.696)),
        ]
    )
]


def test_a_curve_that_ends_with_its_answers_goes_on_while_canaries_find_gains() -> None:
    found = curve(None, _FEW_ANSWERS)
    assert found.after(384) < 2.8
    assert going_on(found, _FEW_ANSWERS).after(384) > 3.2
    still = [
        Mark(version=DrafterVersion(0), updates=453 + 50 * i, used=2.7, trained=2.7)
        for i in range(1, 5)
    ]
    assert going_on(found, [*_FEW_ANSWERS, *still]) == found
    assert going_on(found, _FEW_ANSWERS[:4]) == found


@given(start=st.none() | _lengths, marks=_marks, updates=st.floats(0.0, 1e9))
def test_who_hopes_expects_no_less(start: float | None, marks: list[Mark], updates: float) -> None:
    found = curve(start, marks)
    for further in (going_on(found, marks), lifted(found)):
        assert math.isfinite(further.after(updates))
        assert further.plateau >= found.plateau
        assert further.now - 1e-9 <= further.after(updates) <= further.plateau + 1e-9


def test_more_marks_than_count_change_nothing() -> None:
    marks = _measured(1.0, 5.0, 200.0, marks=100)
    assert curve(1.0, marks) == curve(1.0, marks[-MOST_MARKS:])


# --- what training is worth ---------------------------------------------------------------------


def _ahead(
    spec: JobSpec, step: int, seconds: float = 60.0, members: int = 4
) -> gate.TrainingOutlook:
    left = spec.algorithm.steps - step - 1
    return gate.outlook(left, seconds, members, speedup_model.without(spec, {}))


def _trunk(micro_batches: int) -> DrafterBase:
    first = DrafterVersion(1)
    return DrafterBase(
        version=first, root=first, weights=None, updates=micro_batches, micro_batches=micro_batches
    )


def _taught(marks: list[Mark]) -> DrafterTrainingState:
    drafter_state = DrafterTrainingState()
    for mark in marks:
        evaluation = DrafterEvaluation(used=mark.used, trained=mark.trained, answers=4)
        drafter_state = gate.noted(drafter_state, evaluation, _trunk(mark.updates), _START)
    return drafter_state


def test_a_cold_start_with_many_steps_left_buys_and_trains() -> None:
    spec = small_spec(steps=100, train="auto")
    ahead = _ahead(spec, 0)
    bought = gate.purchase(spec, DrafterTrainingState(), ahead, _START)
    assert bought.worth
    assert bought.cost >= 8.0
    assert bought.saved > 2.0 * bought.cost
    assert gate.worth_training(spec, DrafterTrainingState(), ahead, _START).worth


def test_a_drafter_is_bought_for_what_it_gains_over_ngrams() -> None:
    """Where these are right as often as a drafter would be, it is worth nothing."""
    spec, bought = small_spec(steps=30, train="auto"), list[float]()
    for faster in (1.0, 1.3, 1.6, 2.4):
        spending = add_tallies({}, [_guessed(1000, 1.0 / faster), _plain(20, 1000, 1.0)])
        ahead = gate.outlook(29, 6.0, 2, speedup_model.without(spec, spending))
        bought.append(gate.purchase(spec, DrafterTrainingState(), ahead, _START).saved)
    assert bought == sorted(bought, reverse=True)
    assert bought[0] > 40.0
    assert bought[-1] == 0.0


def test_few_answers_are_not_bought_more_readings_than_they_are_worth() -> None:
    spec = small_spec(steps=30, train="auto")

    def bought(tokens: int, updates: int) -> gate.Verdict:
        drafter_state = DrafterTrainingState(
            tokens=tokens, updates=updates, read=1024 * updates, seconds=updates / 10.0
        )
        ahead = gate.outlook(29, 6.0, 2, 1.25, gate.to_learn(drafter_state))
        return gate.purchase(spec, drafter_state, ahead, _START)

    assert not bought(3_000, 0).worth
    some, many = bought(15_000, 0), bought(200_000, 0)
    assert some.worth
    assert many.worth
    assert many.saved > some.saved
    assert not bought(15_000, 210).worth


def test_what_idle_seconds_soon_teach_anyway_is_not_bought() -> None:
    spec = small_spec(steps=30, train="auto")
    verdicts = [
        gate.purchase(
            spec, DrafterTrainingState(), gate.outlook(29, 6.0, 2, 1.0, idle=idle), _START
        )
        for idle in (0.0, 2.0, 10.0, 200.0)
    ]
    gained = [verdict.saved - verdict.cost for verdict in verdicts]
    assert gained == sorted(gained, reverse=True)
    assert verdicts[0].worth
    assert gained[0] > 2.0 * gained[2]
    assert not verdicts[-1].worth


@given(steps=st.integers(0, 5000), idle=st.floats(0.0, 1000.0), most=st.floats(0.0, 1e5))
def test_a_purchase_never_saves_more_than_there_is(steps: int, idle: float, most: float) -> None:
    spec = small_spec(steps=30, train="auto")
    ahead = gate.outlook(steps, 6.0, 2, 1.25, most, idle)
    verdict = gate.purchase(spec, DrafterTrainingState(), ahead, _START)
    assert 0.0 <= verdict.saved <= 6.0 * steps
    assert not verdict.worth or verdict.saved > 2.0 * verdict.cost


def test_what_ngrams_come_to_is_known_where_it_was_measured() -> None:
    """A tail of single answers has no control run: nobody knows what it would take without them."""
    spec = small_spec(steps=30, train="auto")
    measured = [_guessed(1000, 0.5), _plain(20, 1000, 1.0)]
    found = speedup_model.without(spec, add_tallies({}, measured))
    assert found == pytest.approx(2.0, rel=0.05)
    tail = tally(1000, 9.0, strategy=Ngram(tokens=4), bucket=32)
    assert speedup_model.without(spec, add_tallies({}, [*measured, tail])) == found
    usual = speedup_model.without(spec, {})
    assert speedup_model.without(spec, add_tallies({}, [tail])) == usual
    assert (
        speedup_model.without(spec, add_tallies({}, [_guessed(1000, 0.5), _plain(1, 1000, 1.0)]))
        < found
    )
    # a drafter that decodes beside them takes what they are worse at
    assert speedup_model.without(_named(steps=30), add_tallies({}, measured)) == usual


def _guessed(tokens: int, seconds: float) -> StrategyTally:
    return tally(tokens, seconds, strategy=Ngram(tokens=4))


def _plain(runs: int, tokens: int, seconds: float) -> StrategyTally:
    """Control runs, each of as many tokens and seconds."""
    sums = ControlRuns(
        count=runs,
        tokens_squared=runs * tokens**2,
        seconds_squared=runs * seconds**2,
        product=runs * tokens * seconds,
    )
    return tally(runs * tokens, runs * seconds, strategy=Off(), control=sums)


@given(
    tokens=st.integers(0, 10**6),
    seconds=st.just(0.0) | st.floats(1e-9, 1e6),
    plain=st.just(0.0) | st.floats(1e-9, 1e3),
    runs=st.integers(0, 50),
)
def test_the_pace_of_ngrams_is_a_number(
    tokens: int, seconds: float, plain: float, runs: int
) -> None:
    spending = add_tallies({}, [_guessed(tokens, seconds), _plain(runs, 100, plain)])
    assert 1.0 <= speedup_model.without(small_spec(train="auto"), spending) < math.inf


def test_idle_seconds_find_out_what_bought_ones_may_not() -> None:
    spec = small_spec(steps=30, train="auto")
    ahead, taught = _ahead(spec, 8, seconds=4.5, members=2), _taught(_FEW_ANSWERS)
    taught = msgspec.structs.replace(taught, updates=453, seconds=30.0)
    assert gate.worth_training(spec, taught, ahead, _START).worth
    assert not gate.purchase(spec, taught, ahead, _START).worth


@pytest.mark.parametrize(("trained", "rests"), [(4.25, True), (4.45, False)])
def test_new_answers_are_tried_in_idle_seconds_where_the_curve_has_ended(
    trained: float, rests: bool
) -> None:
    spec = small_spec(steps=100, train="auto")
    found_out = {"vain": 0, "rest_until": _START, "updates": 1600, "seconds": 80.0}
    taught = msgspec.structs.replace(_taught(_ENDED), **found_out)
    assert going_on(curve(None, _ENDED), _ENDED) == curve(None, _ENDED)
    tried = [_tries(spec, taught, Step(0))]
    for step in map(Step, range(1, 6)):
        taught = msgspec.structs.replace(taught, held_out={step: ()})
        tried.append(_tries(spec, taught, step))
        evaluation = DrafterEvaluation(used=4.25, trained=trained, answers=4)
        taught = gate.noted(taught, evaluation, _trunk(1600 + 50 * step), step)
        # the policy is evaluated: there is no answer of the next step yet
        evaluating = _tries(spec, taught, Step(step + 1))
        if rests:
            assert not evaluating
    assert tried == [False, True, True, True, True, not rests]


_ENDED = [
    Mark(version=DrafterVersion(i), updates=1000 + 50 * i, used=4.25, trained=4.25)
    for i in range(12)
]


def _tries(spec: JobSpec, drafter_state: DrafterTrainingState, step: Step) -> bool:
    ahead = _ahead(spec, step, seconds=20.0, members=2)
    assert not gate.purchase(spec, drafter_state, ahead, step).worth
    return gate.worth_training(spec, drafter_state, ahead, step).worth


def test_a_named_drafter_is_measured_before_anything_is_bought() -> None:
    """It may be at its best already; in idle seconds that is found out."""
    named = _named(steps=100)
    ahead = _ahead(named, 0)
    assert not gate.purchase(named, DrafterTrainingState(), ahead, _START).worth
    assert gate.worth_training(named, DrafterTrainingState(), ahead, _START).worth
    weak = _taught([Mark(version=DrafterVersion(1), updates=24, used=2.0, trained=2.4)])
    assert gate.purchase(named, weak, ahead, _START).worth


def test_a_named_drafter_at_its_best_is_trained_once_it_has_lost_of_that() -> None:
    """Rollouts tell, by chains of four: no second goes into finding it out."""
    named = _named(steps=10)
    ahead, began = (
        _ahead(named, 0, seconds=5.0),
        gate.overheard(DrafterTrainingState(), [_told(4.9)]),
    )
    long = _ahead(named, 0, seconds=50.0)
    assert began.expected is not None
    assert began.expected.now == pytest.approx(6.79, abs=0.01)
    assert not gate.worth_training(named, began, ahead, _START).worth
    assert not gate.purchase(named, began, ahead, _START).worth
    later = began
    for _ in range(20):
        later = gate.reckoned(gate.overheard(later, [_told(4.0)]))
    assert later.expected is not None
    assert later.expected.plateau >= 6.7
    assert later.expected.now == pytest.approx(5.04, abs=0.1)
    assert gate.worth_training(named, later, ahead, _START).worth
    # nobody has seen yet whether training brings it back
    assert not gate.purchase(named, later, long, _START).worth


def _named(steps: int) -> JobSpec:
    return small_spec(steps=steps, train="auto", drafter="/drafter")


def _told(length: float) -> StrategyTally:
    return tally(round(5000 * length), 1.0, strategy=Draft(depth=4), rows=5000)


@given(marks=_marks, seconds=st.floats(0.0, 1e5), members=st.integers(1, 64))
@settings(max_examples=40)
def test_nothing_is_bought_at_the_last_step(
    marks: list[Mark], seconds: float, members: int
) -> None:
    spec = small_spec(steps=5, train="auto")
    ahead = _ahead(spec, 4, seconds, members)
    assert not gate.purchase(spec, _taught(marks), ahead, _START).worth
    assert not gate.worth_training(spec, _taught(marks), ahead, _START).worth


@given(length=st.floats(1.0, 6.0), steps=st.integers(2, 30), seconds=st.floats(0.1, 100.0))
@settings(max_examples=40)
def test_nothing_is_bought_where_nothing_is_gained(
    length: float, steps: int, seconds: float
) -> None:
    """The drafter has long been where it stays."""
    marks = [
        Mark(version=DrafterVersion(0), updates=2000 + 24 * i, used=length, trained=length)
        for i in range(1, 41)
    ]
    spec = small_spec(steps=steps, train="auto")
    drafter_state = msgspec.structs.replace(_taught(marks), rest_until=_START)
    verdict = gate.purchase(spec, drafter_state, _ahead(spec, 0, seconds), _START)
    assert verdict.saved <= 0.15 * seconds * steps
    assert verdict.cost <= 0.5 * verdict.saved


@given(marks=_marks, seconds=st.floats(-1e6, 1e6), members=st.integers(0, 64))
@settings(max_examples=40)
def test_who_is_told_always_or_never_does_so(
    marks: list[Mark], seconds: float, members: int
) -> None:
    drafter_state = _taught(marks)
    for train, worth in (("always", True), ("off", False)):
        spec = small_spec(steps=9, train=train)  # pyright: ignore[reportArgumentType]
        ahead = _ahead(spec, 0, seconds, members)
        assert gate.worth_training(spec, drafter_state, ahead, _START).worth is worth
        assert not gate.purchase(spec, drafter_state, ahead, _START).worth


@given(marks=_marks, seconds=st.floats(-1e6, 1e6), members=st.integers(1, 64))
@settings(max_examples=40)
def test_verdicts_are_numbers(marks: list[Mark], seconds: float, members: int) -> None:
    spec = small_spec(steps=9, train="auto")
    for verdict in (
        gate.worth_training(spec, _taught(marks), _ahead(spec, 0, seconds, members), _START),
        gate.purchase(spec, _taught(marks), _ahead(spec, 0, seconds, members), _START),
    ):
        assert math.isfinite(verdict.saved)
        assert verdict.cost >= 0.0
        assert not verdict.worth or verdict.saved > verdict.cost


def test_rests_grow_and_end() -> None:
    spec = small_spec(steps=1000, train="auto")
    drafter_state, step, rests = DrafterTrainingState(), 0, []
    vain = DrafterEvaluation(used=3.0, trained=2.9, answers=4)
    for _ in range(100):
        drafter_state = gate.noted(drafter_state, vain, _trunk(24), Step(step))
        rest = drafter_state.rest_until - step
        if rest > 0:
            for pause in range(step, drafter_state.rest_until):
                ahead = _ahead(spec, pause, 1e6)
                assert not gate.worth_training(spec, drafter_state, ahead, Step(pause)).worth
                assert not gate.purchase(spec, drafter_state, ahead, Step(pause)).worth
        rests.append(rest)
        step = drafter_state.rest_until
    assert rests[:7] == [0, 0, 1, 2, 4, 8, 8]
    assert rests == sorted(rests)
    better = DrafterEvaluation(used=2.9, trained=3.2, answers=4)
    assert gate.noted(drafter_state, better, _trunk(24), Step(step)).vain == 0


@pytest.mark.parametrize(
    ("used", "trained", "adopts", "spoiled"),
    [
        (None, 1.0, False, False),
        (None, 1.2, True, False),
        (2.0, 2.1, True, False),
        (2.0, 2.0, False, False),
        (2.0, 1.9, False, False),
        (2.0, 1.7, False, True),
        (2.0, math.nan, False, False),
        (2.0, math.inf, False, False),
    ],
)
def test_what_is_adopted(used: float | None, trained: float, adopts: bool, spoiled: bool) -> None:
    evaluation = DrafterEvaluation(used=used, trained=trained, answers=4)
    assert gate.adopts(evaluation) is adopts
    assert gate.spoiled(evaluation) is spoiled
    unmeasured = DrafterEvaluation(used=used, trained=trained, answers=0)
    assert not gate.adopts(unmeasured)
    assert not gate.spoiled(unmeasured)
    assert (
        gate.noted(DrafterTrainingState(), unmeasured, _trunk(24), _START) == DrafterTrainingState()
    )


# --- what is learned from -----------------------------------------------------------------------

_candidates = st.lists(
    st.builds(
        Candidate,
        origin=st.sampled_from(["own", "others", "running", "previous"]),
        tokens=st.integers(1, 4000),
        bytes=st.integers(0, 10_000),
        step=st.integers(0, 3),
        taken=st.integers(0, 5),
    ),
    max_size=30,
)


@given(candidates=_candidates, most=st.integers(0, 200_000))
def test_what_is_kept_fits_and_no_more_goes_than_has_to(
    candidates: list[Candidate], most: int
) -> None:
    gone = least_worth(candidates, Step(3), most)
    assert len(set(gone)) == len(gone)
    kept = sum(c.bytes for i, c in enumerate(candidates) if i not in gone)
    assert kept <= most
    if gone:
        assert kept + candidates[gone[-1]].bytes > most


@given(candidates=_candidates, most=st.integers(1, 8000), seed=st.integers(0, 99))
def test_none_is_drawn_twice_and_about_so_many_tokens(
    candidates: list[Candidate], most: int, seed: int
) -> None:
    dice = Random(seed)
    chosen = drawn(candidates, Step(3), most, [dice.random() for _ in range(64)])
    assert len(set(chosen)) == len(chosen)
    assert bool(chosen) == bool(candidates)
    # the first comes whatever its length; the others fit beside it
    assert sum(candidates[i].tokens for i in chosen[1:]) <= max(
        0, most - sum(candidates[i].tokens for i in chosen[:1])
    )
    room = most - sum(candidates[i].tokens for i in chosen)
    assert not any(c.tokens <= room for i, c in enumerate(candidates) if i not in chosen)


def test_what_was_drawn_often_or_is_old_has_its_turn_later() -> None:
    def one(tokens: int, step: int = 3, taken: int = 0) -> Candidate:
        return Candidate(origin="own", tokens=tokens, bytes=1, step=Step(step), taken=taken)

    def share(first: Candidate, second: Candidate) -> float:
        dice = Random(0)
        draws = [drawn([first, second], Step(3), 1, [dice.random()])[0] for _ in range(2000)]
        return 1.0 - sum(draws) / len(draws)

    assert share(one(400), one(100)) == pytest.approx(8 / 9, abs=0.03)
    assert share(one(100), one(100, taken=1)) == pytest.approx(2 / 3, abs=0.04)
    assert share(one(100), one(100, step=2)) == pytest.approx(2 / 3, abs=0.04)
    assert share(one(100, taken=3000), one(100, taken=3000)) == pytest.approx(0.5, abs=0.04)


@given(
    step=st.integers(0, 1000),
    prompts=st.lists(st.integers(0, 10**6), min_size=1, max_size=200, unique=True),
)
def test_one_prompt_in_eight_measures_and_others_are_learned_from(
    step: int, prompts: list[int]
) -> None:
    places = [PromptIndex(prompt) for prompt in prompts]
    held = held_out(Step(step), places)
    assert set(held) < set(places)
    assert len(set(held)) == len(held)
    assert len(held) == (0 if len(places) == 1 else min(max(1, len(places) // 8), 8))
    # whoever is asked, and in whatever order
    assert set(held) == set(held_out(Step(step), places[::-1]))
    for place in places if held else ():
        assert is_held_out(held, Step(step), place, Member(3)) == (place in held)


def test_each_prompt_has_its_turn_to_measure() -> None:
    places = [PromptIndex(n) for n in range(16)]
    held = [prompt for step in range(400) for prompt in held_out(Step(step), places)]
    assert all(30 < held.count(prompt) < 75 for prompt in places)


def test_of_a_single_prompt_one_answer_in_eight_measures() -> None:
    places = [(Step(s), PromptIndex(4), Member(m)) for s in range(40) for m in range(64)]
    held = [is_held_out((), *place) for place in places]
    assert sum(held) / len(held) == pytest.approx(1 / 8, abs=0.02)
    assert held == [is_held_out((), *place) for place in places]
