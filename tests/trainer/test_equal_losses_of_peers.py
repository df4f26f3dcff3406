"""Losses, advantages and corrections equal those of TRL and verl, computed by their own code.

`python -m benchmarks.peer_losses` writes the peers' outputs; neither has to be installed here.
"""

import json
import math
from typing import Any

import pytest

from benchmarks.own_losses import compute_own
from benchmarks.peer_cases import CASES, Case
from benchmarks.peer_inputs import SEED, Inputs, make_inputs
from benchmarks.peer_losses import PEERS, differences
from benchmarks.peer_tensors import pad_inputs


@pytest.fixture(scope="module")
def peers() -> dict[str, Any]:
    return json.loads(PEERS.read_bytes())


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_losses_equal_those_of_trl_and_verl(case: Case, peers: dict[str, Any], inputs: Inputs):
    found = differences(compute_own(case, inputs), peers["cases"][case.key])
    assert max(found.values()) <= case.tolerance


def test_peers_computed_the_same_cases(peers: dict[str, Any]):
    assert peers["seed"] == SEED
    assert list(peers["cases"]) == [case.key for case in CASES]


def test_answers_lie_beyond_every_bound_whatever_their_advantage():
    padded = pad_inputs(make_inputs())
    ratio = (padded.current.detach() - padded.old) * padded.mask
    gap = (padded.old - padded.sampler) * padded.mask
    good = padded.advantages > 0
    for answers in (good, ~good):
        # the tightest and the widest bounds of a token's ratio, and of an answer's
        for nats in (0.2, math.log(5)):
            assert (ratio[answers] > nats).any()
        assert (ratio[answers] < math.log(0.8)).any()
        for nats in (ratio.sum(1)[answers], ratio.mean(1)[answers] / 4e-4):
            assert nats.max() > 1
            assert nats.min() < -1
            assert (nats.abs() < 1).any()
    for nats in (gap, gap.sum(1)):
        assert nats.max() > math.log(3)
        assert nats.min() < -math.log(3)
    # an answer whose product is beyond the cap, though none of its tokens is
    assert (gap.sum(1)[gap.amax(1) < math.log(2)] > math.log(3)).any()
