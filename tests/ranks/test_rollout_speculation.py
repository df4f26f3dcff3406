"""A rank speculates as its spec says, compares with control runs, and stops when told."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.members import decoding_of
from tests.ranks.ranks import local_rank, open_job, with_policy
from tests.samples import JOB, prompt
from tlt.base.strategies import Ngram, Off
from tlt.protocol.rank_messages import DecodePrompts
from tlt.protocol.shared_values import StrategyTally
from tlt.ranks.main import Decoding, Rank
from tlt.spec.config import RolloutSpec, SpeculationSpec

NGRAM = Ngram(tokens=3)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with local_rank(tmp_path, rank=1) as found:
        yield found.rank


def start_decoding(rank: Rank, folder: Path, speculation: SpeculationSpec) -> Decoding:
    rollout = RolloutSpec(max_new_tokens=400, slots=4)
    rank.handle(open_job(folder, with_policy(folder, rollout=rollout, speculation=speculation)))
    prompts = tuple(prompt(7, member=member) for member in range(4))
    rank.handle(DecodePrompts(job=JOB, prompts=prompts))
    return decoding_of(rank)


def decode(decoding: Decoding, steps: int, at: float = 0.0) -> list[StrategyTally]:
    """Decode and return the tallies; the clock makes a report due after each decode step."""
    tallies: list[StrategyTally] = []
    for step in range(steps):
        if decoding.engine.running:
            decoding.rollout.step()
            report = decoding.rollout.report(at + 2.0 * step)
            if report is not None:
                assert (report.rank, report.step, report.purpose) == (1, 0, "train")
                tallies += report.tallies
    return tallies


def test_speculates_as_far_as_it_is_allowed(rank: Rank, tmp_path: Path) -> None:
    speculation = SpeculationSpec(mode="static", strategy=NGRAM, control_share=0.0)
    decoding = start_decoding(rank, tmp_path, speculation)
    assert {tally.strategy for tally in decode(decoding, 30)} == {NGRAM}
    decoding.engine.allow_speculation(False)
    assert {tally.strategy for tally in decode(decoding, 30, at=100.0)} == {Off()}
    decoding.engine.allow_speculation(True)
    assert {tally.strategy for tally in decode(decoding, 1000, at=200.0)} == {NGRAM}
    assert not decoding.engine.running


def test_reports_control_runs_apart_from_other_decode_steps(rank: Rank, tmp_path: Path) -> None:
    speculation = SpeculationSpec(mode="static", strategy=NGRAM, control_share=0.4)
    tallies = decode(start_decoding(rank, tmp_path, speculation), 1000)
    control = [tally for tally in tallies if tally.control is not None]
    assert {tally.strategy for tally in control} == {Off()}
    assert all(tally.tokens == tally.rows for tally in control)
    assert {tally.strategy for tally in tallies if tally.control is None} == {NGRAM}
    assert sum(tally.tokens for tally in tallies) == 4 * 400
