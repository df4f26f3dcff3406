"""Slopes of a soak: within each process's life, whatever its level, with honest intervals."""

from random import Random

from benchmarks.soak_slopes import Point, fit_slope


def _points(slope: float, noise: float, lives: int = 3, jobs: int = 12) -> list[Point]:
    random = Random(3)
    return [
        Point(life, life * jobs + job, minute, 100.0 * life + slope * minute + error)
        for life in range(lives)
        for job in range(jobs)
        for error in [random.gauss(0, noise)]
        for minute in [float(life * jobs + job)]
    ]


def test_levels_of_lives_are_no_slope() -> None:
    found = fit_slope(_points(slope=0.0, noise=0.0), seed=1)
    assert found is not None
    assert abs(found.value) < 1e-9
    assert (found.lives, found.points, found.mean) == (3, 36, 100.0)


def test_finds_a_leak_below_the_noise_of_jobs() -> None:
    found = fit_slope(_points(slope=2.0, noise=5.0), seed=1)
    assert found is not None
    assert 1.0 < found.low < found.value < found.high < 3.0


def test_fits_nothing_to_lives_of_one_job() -> None:
    assert fit_slope(_points(slope=1.0, noise=1.0, jobs=1), seed=1) is None
    assert fit_slope([], seed=1) is None
