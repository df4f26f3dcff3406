"""The first of the ranks that share an engine has it, on the cores of all of them."""

from pathlib import Path

import msgspec
import pytest

from tests.ranks.ranks import open_job, rank_setup
from tests.samples import SPEC
from tlt.errors import ConfigError
from tlt.ranks.rank_job_context import RankJob
from tlt.spec.config import RolloutSpec

CORES = ((0,), (1,), (2,), (3,))


def rank_job(folder: Path, rank: int, width: int, cores: tuple[tuple[int, ...], ...]) -> RankJob:
    rollout = RolloutSpec(engine="sglang", tensor_parallel=width)
    setup = msgspec.structs.replace(rank_setup(folder, rank), cores=cores)
    return RankJob(setup, open_job(folder, msgspec.structs.replace(SPEC, rollout=rollout)))


def test_an_engine_may_use_the_cores_of_its_ranks(tmp_path: Path) -> None:
    assert rank_job(tmp_path, 0, 1, CORES).engine_cores == ((0,),)
    assert rank_job(tmp_path, 2, 2, CORES).engine_cores == ((2,), (3,))
    assert rank_job(tmp_path, 0, 4, CORES).engine_cores == CORES


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_worker_whose_ranks_cannot_form_engines_is_refused(tmp_path: Path, ranks: int) -> None:
    """A job that is resumed may find other workers than it began with."""
    with pytest.raises(ConfigError, match=f"2 needs workers of 2 ranks.* there are {ranks}"):
        _ = rank_job(tmp_path, 0, 2, CORES[:ranks]).engine_cores
