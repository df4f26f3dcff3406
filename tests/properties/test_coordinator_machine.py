"""`decide` keeps a run consistent under deaths, repeated and reordered events, and ends the job.

`tests.simulation.checks` holds the invariants; the world also asserts that a decision repeated at
once, or an old event delivered again, changes nothing.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.simulation.moves import Move
from tests.simulation.specs import small_spec
from tests.simulation.walk import EARLY_ENDS, MOST_DELIVERIES, finish, random_world, step
from tests.simulation.world import World
from tlt.base.id_types import Incarnation, WorkerId
from tlt.policies.run.run_state import Duty, Phase
from tlt.protocol.commands import UpdatePolicy
from tlt.protocol.events import WorkerFailed, WorkerLost
from tlt.protocol.refs import AnswerRef

seeds = st.integers(0, 2**32 - 1)
picks = st.integers(0, 999)
_EXAMPLES = settings().max_examples


def test_every_job_ends_with_all_of_its_steps(walks: dict[int, World]) -> None:
    """The walks themselves assert the invariants after each decision."""
    assert all(world.status == "done" for world in walks.values())


class Coordinator(RuleBasedStateMachine):
    """Let Hypothesis make every choice: it finds short histories."""

    world: World

    @initialize(seed=seeds)
    def begin(self, seed: int) -> None:
        self.world = random_world(Random(seed), early_end=EARLY_ENDS[seed % len(EARLY_ENDS)])

    def _one_of(self, moves: list[Move], pick: int) -> None:
        if moves:
            self.world.do(moves[pick % len(moves)])

    @rule(pick=picks)
    def go_on(self, pick: int) -> None:
        self._one_of(self.world.moves(), pick)

    @rule(times=st.integers(1, 40), seed=seeds)
    def go_on_for_a_while(self, times: int, seed: int) -> None:
        chooser = Random(seed)
        for _ in range(times):
            if self.world.moves():
                step(self.world, chooser, faults=0.0, overtaking=0.0)

    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        self._one_of(self.world.faults(), pick)

    @precondition(lambda self: self.world.log)
    @rule(pick=picks)
    def overtake(self, pick: int) -> None:
        candidates = self.world.deliverable()
        self.world.deliver(candidates[pick % len(candidates)])

    @rule(pick=picks)
    def hear_again(self, pick: int) -> None:
        world = self.world
        world.expect_nothing(world.delivered[pick % len(world.delivered)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            finish(self.world)


Coordinator.TestCase.settings = settings(max_examples=_EXAMPLES // 2, stateful_step_count=30)
TestCoordinator = Coordinator.TestCase


# --- named histories, which random walks meet only by chance --------------------------------------


def _until(world: World, reached: Phase | Duty, chooser: Random) -> bool:
    """Step without faults until a phase is entered or a worker has a duty."""
    for _ in range(MOST_DELIVERIES):
        duties = {known.duty for known in world.state.workers.values()}
        if world.state.phase is reached or (reached in duties and world.state.step > 0):
            return True
        if world.ended:
            return False
        step(world, chooser, faults=0.0, overtaking=0.0)
    return False


@pytest.mark.parametrize("fault", ["crash", "kill", "stop"])
@pytest.mark.parametrize("duty", list(Duty))
@given(seed=seeds)
@settings(max_examples=max(5, _EXAMPLES // 20))
def test_survives_a_death_on_any_duty(duty: Duty, fault: str, seed: int) -> None:
    chooser = Random(seed)
    train = "always" if duty in (Duty.DRAFTER_TRAINING, Duty.STOPPING) else "off"
    world = World(small_spec(steps=3, eval_every=1, train=train, seed=seed % 7), [1, 2, 1])
    if duty is Duty.RESTARTING and _until(world, Duty.POLICY_UPDATE, chooser):
        world.do(Move("crash", (chooser.choice(list(world.incarnations.values())),)))
    if _until(world, duty, chooser):
        having = [worker for worker, known in world.state.workers.items() if known.duty is duty]
        incarnations = [
            world.incarnations[worker] for worker in having if worker in world.incarnations
        ]
        if incarnations:
            world.do(Move(fault, (chooser.choice(incarnations),)))
    finish(world)


_FAULTS = {
    "restart": Move("restart"),
    "reboot": Move("reboot"),
    "reboot with one worker": Move("reboot", (1,)),
    "lose_blobs": Move("lose_blobs"),
}


@pytest.mark.parametrize("fault", _FAULTS)
@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.EVALUATING, Phase.POLICY_UPDATE])
@given(seed=seeds, checkpoint_every=st.integers(1, 4), further=st.integers(0, 12))
@settings(max_examples=max(5, _EXAMPLES // 20))
def test_a_new_coordinator_continues_the_job(
    phase: Phase, fault: str, seed: int, checkpoint_every: int, further: int
) -> None:
    """Updates since the checkpoint run again, with the same results."""
    chooser = Random(seed)
    spec = small_spec(steps=4, eval_every=2, checkpoint_every=checkpoint_every, seed=seed % 7)
    world = World(spec, [1, 2])
    while world.state.policy.version < 1 + seed % 3:
        step(world, chooser, faults=0.0, overtaking=0.0)
    if _until(world, phase, chooser):
        for _ in range(further):
            step(world, chooser, faults=0.0, overtaking=0.0)
    world.do(_FAULTS[fault])
    finish(world)
    if "reboot" in fault:
        assert world.flight <= world.committed, "weights that will never be used again"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_repeated_update_reads_the_same_answers(restarts: bool) -> None:
    """A worker is lost during an update, and the coordinator was perhaps restarted before."""
    chooser = Random(1)
    world = World(small_spec(steps=3, checkpoint_every=3), [1, 2])
    assert _until(world, Duty.POLICY_UPDATE, chooser)
    attempt = world.state.policy.update_attempt
    ((number, answers),) = _answers_to_learn(world, attempt).items()
    assert answers
    if restarts:
        world.do(Move("restart"))
    world.do(Move("crash", (world.incarnations[WorkerId("w0")],)))
    while number not in (repeated := _answers_to_learn(world, attempt + 1)):
        step(world, chooser, faults=0.0, overtaking=0.0)
    assert repeated[number] == answers
    finish(world)


def _answers_to_learn(world: World, attempt: int) -> dict[int, set[AnswerRef]]:
    """Return the answers in commands of this attempt or a later one, by step."""
    answers: dict[int, set[AnswerRef]] = {}
    for incarnation in world.incarnations.values():
        for command in incarnation.commands:
            if isinstance(command, UpdatePolicy) and command.attempt >= attempt:
                refs = (r for share in command.minibatches for rank in share.ranks for r in rank)
                answers.setdefault(command.step, set()).update(ref.answer for ref in refs)
    return answers


@pytest.mark.parametrize("phase", [Phase.ROLLOUT, Phase.EVALUATING, Phase.POLICY_UPDATE])
@given(seed=seeds, checkpoint_every=st.integers(1, 4), further=st.integers(0, 12))
@settings(max_examples=max(5, _EXAMPLES // 20))
def test_a_pause_loses_nothing(
    phase: Phase, seed: int, checkpoint_every: int, further: int
) -> None:
    """All answers are counted once, and no prompt is given up, however few tries it has."""
    chooser = Random(seed)
    spec = small_spec(
        steps=3, eval_every=1, checkpoint_every=checkpoint_every, max_tries=1, seed=seed % 7
    )
    world = World(spec, [1, 2])
    if _until(world, phase, chooser):
        for _ in range(further):
            step(world, chooser, faults=0.0, overtaking=0.0)
    for move in world.pauses.faults():
        world.do(move)
    finish(world)
    assert world.state.losses == 0
    assert not world.checks.dropped


@pytest.mark.parametrize("dynamic_sampling", [False, True])
@given(seed=seeds)
@settings(max_examples=max(5, _EXAMPLES // 5))
def test_order_and_repetition_do_not_change_the_weights(dynamic_sampling: bool, seed: int) -> None:
    """Overtaking and repeated events lead to the same batches and weights if none is lost."""
    spec = small_spec(steps=3, eval_every=1, seed=seed % 7, dynamic_sampling=dynamic_sampling)
    plain, shuffled = World(spec, [1, 1]), World(spec, [1, 1])
    finish(plain)
    chooser = Random(seed)
    while not shuffled.ended:
        step(shuffled, chooser, faults=0.0, overtaking=0.5)
        if shuffled.log and chooser.random() < 0.2:
            shuffled.repeat()
    assert shuffled.status == "done"
    assert shuffled.checks.contents == plain.checks.contents
    assert shuffled.checks.finished.keys() == plain.checks.finished.keys()


@given(seed=seeds, limit=st.integers(0, 3))
@settings(max_examples=max(5, _EXAMPLES // 10))
def test_too_many_losses_fail_the_job(seed: int, limit: int) -> None:
    chooser = Random(seed)
    world = World(small_spec(steps=4, max_restarts=limit), [1, 1])
    while world.state.losses <= limit:
        assert not world.ended
        incarnations = list(world.incarnations.values())
        if incarnations and chooser.random() < 0.1:
            world.workers.crash(chooser.choice(incarnations))
        step(world, chooser, faults=0.0, overtaking=0.0)
        if world.ended:
            break
    assert world.status == ("failed" if world.state.losses > limit else "done")


@pytest.mark.parametrize("speedup", [0.5, 2.0])
def test_gives_up_speculation_that_costs_more(speedup: float) -> None:
    """Workers that join afterwards don't speculate either."""
    world = World(small_spec(steps=4), [1, 1], speedup=speedup)
    chooser = Random(1)
    while world.state.step < 2:
        for incarnation in world.incarnations.values():
            if Move("report_decoding", (incarnation,)) in world.moves():
                world.workers.report_decoding(incarnation)
        step(world, chooser, faults=0.0, overtaking=0.0)
    assert world.state.speculation_allowed == (speedup > 1.0)
    world.workers.crash(world.incarnations[WorkerId("w0")])
    while not world.ended:
        step(world, chooser, faults=0.0, overtaking=0.0)
        speculating = [
            incarnation.speculates
            for incarnation in world.incarnations.values()
            if incarnation.assignment is not None
        ]
        assert speculating == [speedup > 1.0] * len(speculating)


def test_a_refusal_counts_only_from_a_living_incarnation() -> None:
    world = World(small_spec(), [1, 1])
    failed = WorkerFailed(
        job=world.state.job, worker=WorkerId("w0"), incarnation=Incarnation(0), error="no such file"
    )
    world.expect_nothing(failed)
    world.post("w0", WorkerFailed(**{**_fields(failed), "incarnation": Incarnation(1)}))
    world.run_out(100)
    assert world.status == "failed"


def test_a_later_incarnation_that_never_joined_ends_the_one_before() -> None:
    """The actor was restarted and lost again: no other event ends the first incarnation."""
    world = World(small_spec(), [1, 1])
    lost = WorkerLost(
        worker=WorkerId("w0"), incarnation=Incarnation(9), reason="test", returning=False
    )
    world.post("w0", lost)
    world.deliver(len(world.log) - 1)
    assert WorkerId("w0") not in world.state.workers


def test_a_worker_that_fails_to_come_back_is_not_awaited() -> None:
    """The worker is lost before an update, and the others update without it."""
    world = World(small_spec(steps=1), [1, 1])
    chooser = Random(0)
    assert _until(world, Phase.POLICY_UPDATE, chooser)
    world.workers.crash(world.incarnations[WorkerId("w0")])
    for turn in range(100):
        if turn % 10 == 0:
            world.workers.fail_to_start(WorkerId("w0"))
        for move in world.moves():
            if move != Move("start", ("w0",)) and move in world.moves():
                world.do(move)
    assert world.ended
    assert world.status == "done"


def _fields(event: WorkerFailed) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}
