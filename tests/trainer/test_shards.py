"""Ranks that each hold a part of the weights learn what ranks with whole copies learn."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.trainer.models import CPU, never_interrupt, samples, share, spec
from tests.trainer.second_rank import Peer
from tlt.blobs.blob_files import Blobs
from tlt.errors import RankError
from tlt.models.safetensors_io import put_weights
from tlt.models.weight_leaves import Layout
from tlt.trainer import process_group as groups
from tlt.trainer.policy.model.micro_batches import Minibatch
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.policy.sharded_models import count_shards, learner_mesh
from tlt.trainer.shard_files import put_shards

SECONDS = 60.0
# the last rank gets a sample in the first and in the fourth
UPDATES = 5
_SETTINGS: dict[str, Any] = {
    "learning_rate": 2e-3,
    "gradient_clip": 0.5,
    "microbatch_tokens": 48,
    # one attention for both ways: `auto` may measure that another is faster
    "attention": "padded",
}


@pytest.fixture(scope="module")
def peers() -> Iterator[Sequence[Peer]]:
    started = [Peer() for _ in range(4)]
    yield started
    for peer in started:
        peer.close()


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    store, port = groups.serve_rendezvous("127.0.0.1")
    yield f"127.0.0.1:{port}"
    del store


def on_all(peers: Sequence[Peer], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on each peer, with its rank and the number of ranks before the arguments."""
    for rank, peer in enumerate(peers):
        peer.tell(function, rank, len(peers), *arguments)
    return [peer.answer() for peer in peers]


def minibatches(rank: int, world: int, update: int) -> list[Minibatch]:
    """Deal samples unevenly: the last rank gets one now and then, and none otherwise."""
    made: list[Minibatch] = []
    for part in range(2):
        drawn = samples(7, seed=10 * update + part)
        dealt = [drawn[first :: world - 1] for first in range(world - 1)] if world > 1 else [drawn]
        dealt += [drawn[:0]] if world > 1 else []
        if update % 3 == 0 and world > 1:
            dealt[0], dealt[-1] = dealt[0][1:], dealt[0][:1]
        made.append(share(dealt[rank], drawn))
    return made


_NORMALISE = LlamaRMSNorm.forward


def normalise_in_own_type(self: LlamaRMSNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    """Normalise as Transformers does, but not in float32."""
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def start(
    rank: int, world: int, rendezvous: str, name: str, model: str, dtype: str, **changes: Any
) -> tuple[PolicyLearner, Any]:
    group = groups.join_group(rendezvous, name, rank, world, SECONDS, CPU)
    sharded = group is not None and changes.get("shards", 1) != 1
    settings = spec(**_SETTINGS | changes)
    kind: torch.dtype = getattr(torch, dtype)
    LlamaRMSNorm.forward = normalise_in_own_type if dtype == "float64" else _NORMALISE
    learner = PolicyLearner(
        model, settings, None, CPU, group=group if sharded else None, dtype=kind
    )
    return learner, group


def train(
    rank: int,
    world: int,
    rendezvous: str,
    name: str,
    model: str,
    dtype: str,
    changes: dict[str, Any],
    updates: int,
    saved: Path,
) -> list[Any]:
    """Learn, save the weights of the first rank, and return each update's metrics."""
    learner, group = start(rank, world, rendezvous, name, model, dtype, **changes)
    metrics = [
        learner.update(step, minibatches(rank, world, step), group, never_interrupt)
        for step in range(updates)
    ]
    keep(learner, rank, saved)
    groups.leave_group()
    return metrics


def apart(one: Path, other: Path) -> float:
    """Return the relative Frobenius norm of the difference."""
    left, right = load_file(one), load_file(other)
    assert left.keys() == right.keys()
    gap = sum((left[n].double() - right[n].double()).square().sum() for n in left)
    whole = sum(right[n].double().square().sum() for n in right)
    return float(torch.as_tensor(gap / whole).sqrt())


@pytest.mark.parametrize(
    ("dtype", "most", "changes"),
    [
        ("float64", 1e-9, {"kl_coefficient": 0.1, "attention": "packed"}),
        ("float32", 1e-5, {"gradient_checkpointing": True}),
        ("float64", 1e-6, {"kl_coefficient": 0.5, "kl_in": "reward", "advantage": "batch"}),
        ("float64", 1e-6, {"kl_coefficient": 0.5, "kl_in": "reward", "epochs": 2}),
    ],
)
def test_shards_learn_what_whole_copies_learn(
    peers: Sequence[Peer],
    rendezvous: str,
    model_dir: str,
    tmp_path: Path,
    dtype: str,
    most: float,
    changes: dict[str, Any],
) -> None:
    two = peers[:2]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before = on_all(
        two, train, rendezvous, f"w{tmp_path}", model_dir, dtype, changes, UPDATES, whole
    )
    sharded = changes | {"shards": "all"}
    after = on_all(
        two, train, rendezvous, f"s{tmp_path}", model_dir, dtype, sharded, UPDATES, parts
    )
    assert apart(parts, whole) <= most
    assert after[0] == after[1]
    for ours, theirs in zip(after[0], before[0], strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3, abs=1e-6)
        assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3)
        assert (ours.tokens, ours.samples) == (theirs.tokens, theirs.samples)


def test_replicas_of_shards_learn_the_same(
    peers: Sequence[Peer], rendezvous: str, model_dir: str, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_all(peers, train, rendezvous, "w4", model_dir, "float64", {}, 2, whole)
    on_all(peers, train, rendezvous, "h4", model_dir, "float64", {"shards": 2}, 2, parts)
    assert apart(parts, whole) <= 1e-9


def count_bytes(rank: int, world: int, rendezvous: str, name: str, model: str, shards: Any) -> int:
    """Return the bytes of parameters, gradients and optimiser while an update runs."""
    learner, group = start(rank, world, rendezvous, name, model, "float32", shards=shards)
    learner.update(0, minibatches(rank, world, 0), group, never_interrupt)
    peak = 0

    def held(tensor: torch.Tensor) -> int:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return own.numel() * own.element_size()

    def measure() -> None:
        nonlocal peak
        parameters = list(learner.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        kept = (*parameters, *gradients, *learner.optimiser_state().values())
        peak = max(peak, sum(map(held, kept)))

    learner.update(1, minibatches(rank, world, 1), group, measure)
    groups.leave_group()
    return peak


def test_two_shards_take_little_more_than_half_of_the_bytes(
    peers: Sequence[Peer], rendezvous: str, model_dir: str
) -> None:
    two = peers[:2]
    whole = max(on_all(two, count_bytes, rendezvous, "wb", model_dir, 1))
    parts = max(on_all(two, count_bytes, rendezvous, "sb", model_dir, "all"))
    assert 0.5 * whole <= parts <= 0.55 * whole


def save_after(
    rank: int, world: int, rendezvous: str, model: str, folder: Path, shards: Any = "all"
) -> None:
    """Save after two updates, and the weights of a third."""
    name = f"save {folder}"
    learner, group = start(rank, world, rendezvous, name, model, "float64", shards=shards)
    for step in range(2):
        learner.update(step, minibatches(rank, world, step), group, never_interrupt)
    keep(learner, rank, folder / "weights")
    learner.save_optimiser(folder / "optimiser")
    learner.update(2, minibatches(rank, world, 2), group, never_interrupt)
    keep(learner, rank, folder / "next")
    groups.leave_group()


def keep(learner: PolicyLearner, rank: int, file: Path) -> None:
    dtype = next(iter(learner.parameters())).dtype
    layout = Layout({name: (shape, dtype) for name, shape in learner.shapes().items()})
    blobs = Blobs(file.parent / "flight", file.parent / "none")
    if learner.is_sharded:
        ref = put_shards(blobs, learner.shards(), layout, commit=False)
    else:
        ref = None if rank else put_weights(blobs, learner.weights(), commit=False)
    if ref is not None:
        blobs.verify(ref).replace(file)


def resume(rank: int, world: int, rendezvous: str, model: str, folder: Path, out: Path) -> None:
    learner, group = start(
        rank, world, rendezvous, f"resume{world}", model, "float64", shards="all"
    )
    learner.load_weights(load_file(folder / "weights"))
    learner.load_optimiser(folder / "optimiser")
    learner.update(2, minibatches(rank, world, 2), group, never_interrupt)
    keep(learner, rank, out)
    groups.leave_group()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_another_number_of_ranks_resumes_a_checkpoint_of_two(
    peers: Sequence[Peer],
    rendezvous: str,
    model_dir: str,
    fresh_dir: str,
    tmp_path: Path,
    world: int,
) -> None:
    on_all(peers[:2], save_after, rendezvous, model_dir, tmp_path)
    on_all(peers[:world], resume, rendezvous, fresh_dir, tmp_path, tmp_path / "resumed")
    assert apart(tmp_path / "resumed", tmp_path / "next") <= 1e-9
    assert apart(tmp_path / "resumed", tmp_path / "weights") > 1e-5


@pytest.mark.parametrize(("ranks", "shards"), [(2, "all"), (4, 2)])
def test_ranks_learn_and_save_the_same_in_other_places(
    peers: Sequence[Peer],
    rendezvous: str,
    model_dir: str,
    tmp_path: Path,
    ranks: int,
    shards: Any,
) -> None:
    """DTensor caches what it derives from a mesh; another rank has to be another mesh."""
    members = peers[:ranks]
    for folder, placed in (("before", members), ("after", [*reversed(members)])):
        (tmp_path / folder).mkdir()
        on_all(placed, save_after, rendezvous, model_dir, tmp_path / folder, shards)
    assert apart(tmp_path / "after" / "next", tmp_path / "before" / "next") <= 1e-9


def save_whole(rank: int, world: int, rendezvous: str, model: str, folder: Path) -> None:
    """Save as a rank with a whole copy does, and the weights of a third update."""
    learner, group = start(rank, world, rendezvous, "whole", model, "float64", shards="all")
    for step in range(2):
        learner.update(step, minibatches(rank, world, step), group, never_interrupt)
    keep(learner, rank, folder / "weights")
    save_file(learner.optimiser_state(), folder / "optimiser")
    learner.update(2, minibatches(rank, world, 2), group, never_interrupt)
    keep(learner, rank, folder / "next")


def resume_whole(
    rank: int, world: int, rendezvous: str, model: str, folder: Path, out: Path
) -> None:
    learner, group = start(rank, world, rendezvous, "split", model, "float64", shards="all")
    learner.load_weights(load_file(folder / "weights"))
    learner.load_optimiser_state(load_file(folder / "optimiser"))
    learner.update(2, minibatches(rank, world, 2), group, never_interrupt)
    keep(learner, rank, out)
    groups.leave_group()


def test_two_ranks_resume_a_checkpoint_of_one(
    peers: Sequence[Peer], rendezvous: str, model_dir: str, fresh_dir: str, tmp_path: Path
) -> None:
    on_all(peers[:1], save_whole, rendezvous, model_dir, tmp_path)
    on_all(peers[:2], resume_whole, rendezvous, fresh_dir, tmp_path, tmp_path / "resumed")
    assert apart(tmp_path / "resumed", tmp_path / "next") <= 1e-9


def die_in_update(rank: int, world: int, rendezvous: str, model: str) -> str:
    learner, group = start(rank, world, rendezvous, "die", model, "float32", shards="all")

    def between() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        learner.update(0, minibatches(rank, world, 0), group, between)
    except RankError as error:
        return str(error)
    finally:
        groups.leave_group()
    return "no error"


def test_a_dead_member_ends_the_group_at_once(rendezvous: str, model_dir: str) -> None:
    doomed = [Peer(), Peer()]
    try:
        for rank, peer in enumerate(doomed):
            peer.tell(die_in_update, rank, 2, rendezvous, model_dir)
        assert "failed" in doomed[0].answer()
    finally:
        for peer in doomed:
            peer.close()


def compute_in_bfloat16(
    rank: int, world: int, rendezvous: str, model: str
) -> tuple[set[str], float]:
    learner, group = start(
        rank, world, rendezvous, "bf16", model, "float32", shards="all", precision="bfloat16"
    )
    metrics = learner.update(0, minibatches(rank, world, 0), group, never_interrupt)
    kept = (*learner.parameters(), *learner.optimiser_state().values())
    groups.leave_group()
    return {str(tensor.dtype) for tensor in kept if tensor.is_floating_point()}, metrics.loss


def test_masters_stay_float32_where_layers_compute_in_bfloat16(
    peers: Sequence[Peer], rendezvous: str, model_dir: str, tmp_path: Path
) -> None:
    two, saved = peers[:2], tmp_path / "saved"
    exact = on_all(two, train, rendezvous, "f32", model_dir, "float32", {"shards": "all"}, 1, saved)
    kinds, loss = on_all(two, compute_in_bfloat16, rendezvous, model_dir)[0]
    assert kinds == {"torch.float32"}
    assert loss == pytest.approx(exact[0][0].loss, rel=0.05, abs=5e-3)
    assert loss != exact[0][0].loss


@pytest.mark.parametrize(
    ("wanted", "ranks", "expected"),
    [("all", 7, 7), (1, 7, 1), (4, 8, 4), (4, 6, 6), (4, 7, 7), (2, 6, 2), (3, 8, 4), (4, 3, 3)],
)
def test_shards_are_as_many_as_wanted_or_more_where_ranks_were_lost(
    wanted: int | Literal["all"], ranks: int, expected: int
) -> None:
    assert count_shards(wanted, ranks) == expected


def deadlines(rank: int, world: int, rendezvous: str) -> list[float]:
    """Return the seconds after which collectives of a mesh with replicas fail."""
    group = groups.join_group(rendezvous, "deadlines", rank, world, 7.0, CPU)
    assert group is not None
    mesh = learner_mesh(group, 2, CPU, timedelta(seconds=7))
    found: list[float] = []
    for name in mesh.mesh_dim_names or ():
        backend: Any = mesh.get_group(name)._get_backend(CPU)
        found.append(backend.options._timeout.total_seconds())
    groups.leave_group()
    return found


def test_groups_of_replicas_and_shards_have_the_deadline(
    peers: Sequence[Peer], rendezvous: str
) -> None:
    assert on_all(peers, deadlines, rendezvous) == [[7.0, 7.0]] * 4


def test_four_ranks_train_with_three_shards_wanted(
    peers: Sequence[Peer], rendezvous: str, model_dir: str, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    (whole, *_) = on_all(
        peers, train, rendezvous, "all", model_dir, "float64", {"shards": "all"}, 1, saved
    )
    (three, *_) = on_all(
        peers, train, rendezvous, "three", model_dir, "float64", {"shards": 3}, 1, saved
    )
    assert three[0].loss == pytest.approx(whole[0].loss, rel=1e-12)
