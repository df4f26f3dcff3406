import pytest

from tests.trainer.models import spec
from tlt.policies.algorithm.learning_rate import learning_rate


def rates(**changes: object) -> list[float]:
    algorithm = spec(steps=6, learning_rate=1.0, warmup_steps=2, **changes)
    return [learning_rate(algorithm, step) for step in range(6)]


def test_constant_schedule_stays_after_the_warm_up():
    assert rates(schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_schedule_ends_one_step_above_zero():
    assert rates(schedule="linear") == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_schedule_falls_slowly_at_both_ends():
    found = rates(schedule="cosine")
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[3:] == pytest.approx([0.85355, 0.5, 0.14645], abs=1e-5)


def test_beyond_the_last_step_the_rate_stays_at_the_end():
    assert learning_rate(spec(steps=6, schedule="linear"), 99) == 0.0


def test_warm_up_of_the_whole_job_never_falls():
    algorithm = spec(steps=4, learning_rate=1.0, warmup_steps=4, schedule="cosine")
    found = [learning_rate(algorithm, step) for step in range(4)]
    assert found == [0.25, 0.5, 0.75, 1.0]
