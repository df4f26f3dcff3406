"""Two processes of a gloo group agree, and one survives the loss of the other."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import ProcessGroup

from tests.trainer import reference
from tests.trainer.models import CPU, copies, learner, never_interrupt, samples, share, whole
from tests.trainer.second_rank import Peer
from tlt.errors import RankError
from tlt.protocol.shared_values import UpdateMetrics
from tlt.trainer import process_group as groups
from tlt.trainer.collectives import reduce_sum
from tlt.trainer.policy.model.micro_batches import Minibatch

RATE = 1e-3


@pytest.fixture
def doomed() -> Iterator[Peer]:
    other = Peer()
    yield other
    other.close()


def join(rendezvous: str, name: str, rank: int, seconds: float = 30.0) -> ProcessGroup:
    group = groups.join_group(rendezvous, name, rank, 2, seconds, CPU)
    assert group is not None
    return group


def shares(rank: int) -> list[Minibatch]:
    """Make two uneven minibatches, and one without samples on rank 1."""
    parts = [samples(7, seed=1), samples(6, seed=2), samples(3, seed=3)]
    cuts = [5, 1, 3]
    return [
        share(part[:cut] if rank == 0 else part[cut:], part)
        for part, cut in zip(parts, cuts, strict=True)
    ]


def update_as(
    rank: int, rendezvous: str, folder: str, averaging: str, saved: Path
) -> UpdateMetrics:
    learns = learner(folder, averaging=averaging, learning_rate=RATE, gradient_clip=0.1)
    metrics = learns.update(0, shares(rank), join(rendezvous, averaging, rank), never_interrupt)
    groups.leave_group()
    save_file(learns.weights(), saved)
    return metrics


@pytest.mark.parametrize("averaging", ["token", "sequence"])
def test_two_ranks_end_with_the_weights_of_one(
    peer: Peer, rendezvous: str, model_dir: str, tmp_path: Path, averaging: str
):
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    peer.tell(update_as, 1, rendezvous, model_dir, averaging, files[1])
    ours = update_as(0, rendezvous, model_dir, averaging, files[0])
    assert peer.answer() == ours

    alone = learner(model_dir, averaging=averaging, learning_rate=RATE, gradient_clip=0.1)
    minibatches = [
        share([*a.samples, *b.samples], [*a.samples, *b.samples])
        for a, b in zip(shares(0), shares(1), strict=True)
    ]
    metrics = alone.update(0, minibatches, None, never_interrupt)
    assert (metrics.tokens, metrics.samples) == (ours.tokens, ours.samples)
    assert metrics.loss == pytest.approx(ours.loss, abs=1e-5)
    assert metrics.gradient_norm == pytest.approx(ours.gradient_norm, rel=1e-4)
    first, second = (load_file(file) for file in files)
    for name, tensor in alone.weights().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=0, atol=1e-5)


def disagree(rendezvous: str, folder: str) -> None:
    group = join(rendezvous, "apart", 1)
    theirs = samples(2, seed=9)
    other = [share(theirs, theirs), share([], theirs)]
    learner(folder, learning_rate=RATE).update(0, other, group, never_interrupt)
    groups.leave_group()


def test_one_rank_with_a_differing_token_makes_all_ranks_recompute(
    peer: Peer, rendezvous: str, model_dir: str
):
    parts = [whole(reference.drawn_by(model_dir, 2, seed)) for seed in (1, 2)]
    calls: list[None] = []
    learns = learner(model_dir, learning_rate=RATE, microbatch_tokens=1)
    learns.update(0, parts, None, lambda: calls.append(None))
    assert len(calls) == 2 + 1 + 2
    peer.tell(disagree, rendezvous, model_dir)
    group = join(rendezvous, "apart", 0)
    learns = learner(model_dir, learning_rate=RATE, microbatch_tokens=1)
    learns.update(0, parts, group, lambda: calls.append(None))
    assert len(calls) == 2 + 1 + 2 + 2 + 1 + 2 + 2
    peer.answer()


def compiles_in(rendezvous: str, name: str, rank: int, folder: str) -> list[int]:
    """Return the updates in which this rank compiles; the first is without samples on rank 1."""
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "tlt.trainer.policy.policy_learner.compile_layers", lambda *_: seen.append(step)
        )
        learns = learner(folder, compile=True)
        group = join(rendezvous, name, rank)
        all_samples = samples(4)
        for step, cut in enumerate((4, 2, 2)):
            mine = all_samples[:cut] if rank == 0 else all_samples[cut:]
            learns.update(step, [share(mine, all_samples)], group, never_interrupt)
        groups.leave_group()
    return seen


def test_all_ranks_compile_layers_in_the_same_update(peer: Peer, rendezvous: str, model_dir: str):
    peer.tell(compiles_in, rendezvous, "compile", 1, model_dir)
    assert compiles_in(rendezvous, "compile", 0, model_dir) == [1]
    assert peer.answer() == [1]


def receive_as(rendezvous: str, name: str, folder: str, saved: Path) -> int:
    """Join with a different state, and receive that of rank 0."""
    learns = learner(folder, learning_rate=RATE)
    learns.update(0, [whole(samples(2, seed=5))], None, never_interrupt)
    group = join(rendezvous, name, 1)
    learns.broadcast(0, group)
    groups.leave_group()
    save_file(learns.weights() | learns.optimiser_state(), saved)
    return int(learns.optimiser_state()["step"])


@pytest.mark.parametrize("updates", [0, 2])
def test_broadcast_replaces_weights_and_optimiser(
    peer: Peer, rendezvous: str, model_dir: str, fresh_dir: str, tmp_path: Path, updates: int
):
    saved = tmp_path / "received.safetensors"
    peer.tell(receive_as, rendezvous, f"broadcast-{updates}", fresh_dir, saved)
    learns = learner(model_dir, learning_rate=RATE)
    for step in range(updates):
        learns.update(step, [whole(samples(4, seed=step))], None, never_interrupt)
    before = copies(learns.weights())
    learns.broadcast(0, join(rendezvous, f"broadcast-{updates}", 0))
    assert peer.answer() == updates
    received = load_file(saved)
    expected = learns.weights() | learns.optimiser_state()
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(before[name], tensor) for name, tensor in learns.weights().items())


def fresh_receives(rendezvous: str, folder: str, saved: Path) -> None:
    learns = learner(folder, learning_rate=RATE)
    group = join(rendezvous, "newcomer", 0)
    learns.broadcast(1, group)
    learns.update(1, shares(0), group, never_interrupt)
    groups.leave_group()
    save_file(learns.weights(), saved)


def test_newcomer_continues_like_the_others(
    peer: Peer, rendezvous: str, model_dir: str, fresh_dir: str, tmp_path: Path
):
    saved = tmp_path / "newcomer.safetensors"
    peer.tell(fresh_receives, rendezvous, fresh_dir, saved)
    learns = learner(model_dir, learning_rate=RATE)
    learns.update(0, [whole(samples(4))], None, never_interrupt)
    group = join(rendezvous, "newcomer", 1)
    learns.broadcast(1, group)
    learns.update(1, shares(1), group, never_interrupt)
    peer.answer()
    theirs = load_file(saved)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in learns.weights().items())


def die_in(rendezvous: str) -> None:
    """Join one sum, then die."""
    reduce_sum(torch.ones(1), join(rendezvous, "doomed", 1, 60.0))
    os.kill(os.getpid(), signal.SIGKILL)


def test_notices_a_dead_member_at_once(doomed: Peer, rendezvous: str, model_dir: str):
    doomed.tell(die_in, rendezvous)
    group = join(rendezvous, "doomed", 0, 60.0)
    reduce_sum(torch.ones(1), group)
    learns = learner(model_dir)
    began = time.monotonic()
    with pytest.raises(RankError, match="sum over the ranks"):
        learns.update(0, shares(0), group, never_interrupt)
    assert time.monotonic() - began < 20


def join_only(rendezvous: str) -> None:
    join(rendezvous, "silent", 1)


def test_gives_up_a_silent_member_at_the_deadline(peer: Peer, rendezvous: str):
    peer.tell(join_only, rendezvous)
    group = join(rendezvous, "silent", 0, 1.0)
    peer.answer()
    began = time.monotonic()
    with pytest.raises(RankError, match="sum over the ranks"):
        reduce_sum(torch.ones(1), group)
    assert 0.5 < time.monotonic() - began < 10
    peer.tell(groups.leave_group)
    peer.answer()


def sum_in(rendezvous: str, name: str, rank: int) -> float:
    value = torch.ones(1)
    reduce_sum(value, join(rendezvous, name, rank))
    groups.leave_group()
    return value.item()


def test_forms_a_group_after_a_failed_join(peer: Peer, rendezvous: str):
    began = time.monotonic()
    with pytest.raises(RankError, match="joining the group absent"):
        groups.join_group(rendezvous, "absent", 0, 2, 1.0, CPU)
    assert time.monotonic() - began < 10
    peer.tell(sum_in, rendezvous, "present", 1)
    assert sum_in(rendezvous, "present", 0) == 2.0
    assert peer.answer() == 2.0


def test_gives_up_a_missing_rendezvous_at_the_deadline():
    with pytest.raises(RankError, match="joining the group lonely"):
        groups.join_group("127.0.0.1:1", "lonely", 0, 2, 1.0, CPU)


def test_single_rank_needs_no_group():
    assert groups.join_group("nowhere:1", "alone", 0, 1, 1.0, CPU) is None


def test_a_rendezvous_listens_on_its_own_address_only(rendezvous: str) -> None:
    port = int(rendezvous.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)
    with pytest.raises(RankError, match="serving a rendezvous on"):
        groups.serve_rendezvous("198.51.100.77")
