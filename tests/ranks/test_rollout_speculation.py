"""A rank speculates as its job says, measures that against rounds without, and stops if told."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.samples import JOB, SPEC, prompt
from tests.session import write_policy
from tlt.config import PolicySpec, RolloutSpec, SpeculationSpec
from tlt.ids import Epoch, Incarnation, WorkerId
from tlt.protocol.records import StrategyTally
from tlt.ranks.main import Job, Rank
from tlt.ranks.worker_channel import Decode, Load, Plain, Progress, RankChannel
from tlt.strategies import Ngram, Off

NGRAM = Ngram(tokens=3)


@pytest.fixture
def rank() -> Iterator[Rank]:
    ours, theirs = socket.socketpair()
    memory = os.memfd_create("progress")
    os.ftruncate(memory, Progress.SIZE)
    channel = RankChannel(ours.detach())
    yield Rank(channel, Progress(memory), torch.device("cpu"))
    channel._socket.close()
    theirs.close()
    os.close(memory)


def opened(rank: Rank, folder: Path, speculation: SpeculationSpec) -> Job:
    spec = msgspec.structs.replace(
        SPEC,
        policy=PolicySpec(path=str(write_policy(folder / "policy", layers=1))),
        rollout=RolloutSpec(max_new_tokens=400, slots=4),
        speculation=speculation,
    )
    rank._obey(
        Load(
            job=JOB,
            epoch=Epoch(1),
            spec=spec,
            worker=WorkerId("worker-1"),
            incarnation=Incarnation(1),
            rank=1,
            flight=str(folder),
            committed=str(folder),
        )
    )
    rank._obey(Decode(prompts=tuple(prompt(7, member=member) for member in range(4))))
    assert rank._job is not None
    return rank._job


def decoded(job: Job, rounds: int) -> list[StrategyTally]:
    """How it went; what is said once a second is asked for after each round."""
    told: list[StrategyTally] = []
    for round in range(rounds):
        if job.rollout.engine.running:
            job.rollout.step()
            chosen = job.rollout.strategies(2.0 * round)
            if chosen is not None:
                assert (chosen.rank, chosen.step, chosen.purpose) == (1, 0, "train")
                told += chosen.tallies
    return told


def test_it_decodes_without_speculation_once_it_is_told(rank: Rank, tmp_path: Path) -> None:
    speculation = SpeculationSpec(mode="static", strategy=NGRAM, control_share=0.0)
    job = opened(rank, tmp_path, speculation)
    assert {tally.strategy for tally in decoded(job, 30)} == {NGRAM}
    rank._obey(Plain(job=JOB))
    after = decoded(job, 1000)
    assert {tally.strategy for tally in after} == {Off()}
    assert not job.rollout.engine.running


def test_some_rounds_are_control_and_each_report_has_its_number(rank: Rank, tmp_path: Path) -> None:
    speculation = SpeculationSpec(mode="static", strategy=NGRAM, control_share=0.4)
    told = decoded(opened(rank, tmp_path, speculation), 1000)
    control = [tally for tally in told if tally.control is not None]
    assert {tally.strategy for tally in control} == {Off()}
    assert all(tally.tokens == tally.rows for tally in control)
    assert {tally.strategy for tally in told if tally.control is None} == {NGRAM}
    assert sum(tally.tokens for tally in told) == 4 * 400
