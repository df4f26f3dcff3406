"""Publish weights and drafter deltas, and compare the seconds with a copy of the same bytes.

`python -m benchmarks.weights --out F.json`

A rank publishes weights in the shape of Qwen3-0.6B, in bfloat16, and two engines of the host, each
a process of its own, say when they have the verified bytes. Then two ranks publish the same that
hold half of it each; and weights are published as earlier versions did: by one thread, which reads
them again for a checksum, as does each engine. The copy is from one file in shared memory to a new
one, by a thread on each core. All take turns. Before each, as much shared memory is used and freed
as it takes, because a hypervisor takes memory back that was free for seconds, and is slow to give
it again.
"""

import argparse
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.result import at_most, write_result
from tlt.base.id_types import Digest, DrafterVersion
from tlt.base.interrupt_check import never_interrupt
from tlt.blobs.blob_digest import digest_file
from tlt.blobs.blob_files import Blobs
from tlt.models.eagle_drafter import DrafterConfig, new_drafter
from tlt.models.rope import PlainRope
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.models.weight_leaves import Layout
from tlt.protocol.refs import BlobRef, DrafterBase
from tlt.ranks.drafter.delta_publisher import put_delta
from tlt.ranks.drafter.merged_delta_tracker import DeltaTracker
from tlt.trainer import process_group as groups
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.samples import EmbeddingAndHead
from tlt.trainer.shard_files import put_shards

_CPU = torch.device("cpu")
_ENGINES, _SHARDS = 2, 2
_SECONDS = 120.0
# of Qwen3-0.6B, whose head is the embedding
_VOCABULARY, _HIDDEN, _INTERMEDIATE, _LAYERS, _QUERIES, _KEYS = 151_936, 1024, 3072, 28, 2048, 1024
_EARLIER = Digest("0" * 40)
_COPIED_BYTES, _CACHED_BYTES = 16 << 20, 1 << 20
# as large as the policy's weights
_TOUCHED_BYTES = 5 << 28

Shapes = dict[str, tuple[int, ...]]


def policy_shapes() -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for layer in range(_LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (_QUERIES, _HIDDEN),
                "self_attn.k_proj": (_KEYS, _HIDDEN),
                "self_attn.v_proj": (_KEYS, _HIDDEN),
                "self_attn.o_proj": (_HIDDEN, _QUERIES),
                "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
                "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
                "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
                "input_layernorm": (_HIDDEN,),
                "post_attention_layernorm": (_HIDDEN,),
            }.items()
        }
    return shapes


class Engines:
    """Processes that read weights as engines do, before they convert them."""

    def __init__(self, flight: Path) -> None:
        self._pipes = [start(_read_weights, flight) for _ in range(_ENGINES)]

    def read(self, ref: BlobRef) -> None:
        """Return when all have the verified weights."""
        for pipe in self._pipes:
            pipe.send(ref)
        for pipe in self._pipes:
            assert pipe.recv() == "read"

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)


def start(function: Callable[..., None], *arguments: Any) -> Connection:
    """Run a function in another process, and return the pipe that is its first argument."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=function, args=(theirs, *arguments), daemon=True).start()
    assert ours.recv() == "started"
    return ours


def _read_weights(pipe: Connection, flight: Path) -> None:
    torch.set_num_threads(1)
    pipe.send("started")
    while (ref := pipe.recv()) is not None:
        weights = read_weights(Blobs(flight, flight / "none"), ref)
        pipe.send("read")
        del weights


def _help_to_publish(pipe: Connection, rendezvous: str, flight: Path) -> None:
    torch.set_num_threads(1)
    tensors = draw(policy_shapes())
    pipe.send("started")
    shards = shards_of(tensors, 1, rendezvous)
    while pipe.recv() == "publish":
        blobs = Blobs(flight, flight / "none")
        assert put_shards(blobs, shards, layout_of(shards), commit=False) is None
    groups.leave_group()


def shards_of(tensors: Mapping[str, Tensor], rank: int, rendezvous: str) -> dict[str, DTensor]:
    """Join the other rank, and return this rank's rows of all weights."""
    group = groups.join_group(rendezvous, "weights", rank, _SHARDS, _SECONDS, _CPU)
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    return {
        name: DTensor.from_local(whole.chunk(_SHARDS)[rank], mesh, [Shard(0)], run_check=False)
        for name, whole in tensors.items()
    }


def draw(shapes: Shapes) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(1 << 20, generator=generator).bfloat16()
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    return {
        name: drawn.repeat(-(-size // len(drawn)))[:size].view(shapes[name])
        for name, size in sizes.items()
    }


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return Layout({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})


def publish_shards(blobs: Blobs, shards: Mapping[str, DTensor]) -> BlobRef:
    ref = put_shards(blobs, shards, layout_of(shards), commit=False)
    assert ref is not None, "the first rank names the file"
    return ref


def publish_as_before(blobs: Blobs, tensors: Mapping[str, Tensor]) -> BlobRef:
    """Write in one thread, and read the file again for its checksum."""
    unfinished = blobs.flight / ".unfinished"
    save_file(dict(tensors), unfinished)
    ref = digest_file(unfinished, never_interrupt, _EARLIER)
    unfinished.replace(blobs.flight / ref.digest)
    return ref


def copy_in_threads(source: Path, target: Path) -> None:
    """Copy a file to a new one, by a thread on each core, in what stays in a core's cache."""

    def copy(begin: int) -> None:
        chunk = memoryview(bytearray(_CACHED_BYTES))
        for offset in range(begin, begin + _COPIED_BYTES, _CACHED_BYTES):
            count = os.preadv(read.fileno(), [chunk], offset)
            os.pwrite(written.fileno(), chunk[:count], offset)

    threads, size = len(os.sched_getaffinity(0)), source.stat().st_size
    with (
        source.open("rb") as read,
        target.open("wb") as written,
        ThreadPoolExecutor(threads) as pool,
    ):
        list(pool.map(copy, range(0, size, _COPIED_BYTES)))


def new_tracker() -> DeltaTracker:
    """Return a member that trains an EAGLE drafter of an 8B policy."""
    config = DrafterConfig(
        layout="eagle",
        hidden=4096,
        intermediate=12_288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        norm_eps=1e-6,
        rope=PlainRope(theta=1e6),
        max_positions=4096,
        vocabulary=8,
        captured=(36,),
    )
    ends = EmbeddingAndHead(embedding=torch.zeros(8, 4096), head=torch.zeros(8, 4096))
    sizes = torch.ones(2 * 4096)
    learner = DrafterLearner(new_drafter(config), ends, DrafterHyperparameters(), sizes)
    tracker = DeltaTracker("w0.0", learner)
    first = DrafterVersion(0)
    base = DrafterBase(version=first, root=first, weights=None, updates=0, micro_batches=0)
    tracker.move_to(base, tracker.root)
    return tracker


@torch.no_grad()
def learn(tracker: DeltaTracker) -> None:
    for tensor in tracker.learner.live().tensors.values():
        tensor.mul_(1.001)
    tracker.learner.updates += 1


def publish_delta_as_before(blobs: Blobs, tracker: DeltaTracker) -> BlobRef:
    """Copy what was learned, subtract the base in float32, and write it tensor by tensor."""
    now, base = tracker.learner.live().tensors, tracker.root.tensors
    delta = {name: tensor.clone() - base[name] for name, tensor in now.items()}
    return publish_as_before(blobs, delta)


class Round(NamedTuple):
    """Seconds of one turn of each."""

    copied: float
    published: float
    before: float | None = None
    sharded: float | None = None
    read: float | None = None

    def ratio(self, name: str) -> float:
        return getattr(self, name) / self.copied


class Rank:
    """The rank that publishes, beside those who read and help."""

    def __init__(self, flight: Path) -> None:
        self._blobs = Blobs(flight, flight / "none")
        self.engines = Engines(flight)

    def seconds(self, publish: Callable[[], BlobRef]) -> tuple[float, BlobRef]:
        """Return the seconds until both engines have verified bytes."""
        self._touch_memory()
        began = time.perf_counter()
        ref = publish()
        self.engines.read(ref)
        return time.perf_counter() - began, ref

    def release(self, ref: BlobRef) -> float:
        """Copy the published file, for comparison, and delete both."""
        copy = self._blobs.flight / ".copy"
        self._touch_memory()
        began = time.perf_counter()
        copy_in_threads(self._blobs.path(ref), copy)
        taken = time.perf_counter() - began
        copy.unlink()
        self._blobs.release(ref)
        return taken

    def _touch_memory(self) -> None:
        file = self._blobs.flight / ".touched"
        with file.open("wb") as out:
            for _ in range(_TOUCHED_BYTES // _COPIED_BYTES):
                out.write(bytes(_COPIED_BYTES))
        file.unlink()

    def publish_policy(self, rounds: int) -> list[Round]:
        store, port = groups.serve_rendezvous("127.0.0.1")
        other = start(_help_to_publish, f"127.0.0.1:{port}", self._blobs.flight)
        tensors = draw(policy_shapes())
        shards = shards_of(tensors, 0, f"127.0.0.1:{port}")
        found: list[Round] = []
        for _ in range(rounds):
            before, ref = self.seconds(lambda: publish_as_before(self._blobs, tensors))
            self._blobs.release(ref)
            other.send("publish")
            sharded, ref = self.seconds(lambda: publish_shards(self._blobs, shards))
            self._blobs.release(ref)
            published, same = self.seconds(lambda: put_weights(self._blobs, tensors, commit=False))
            assert same == ref, "shards lead to other bytes"
            found.append(Round(self.release(ref), published, before, sharded))
        other.send("end")
        groups.leave_group()
        del store
        return found

    def publish_deltas(self, rounds: int) -> list[Round]:
        tracker, found = new_tracker(), list[Round]()
        before, ref = self.seconds(lambda: publish_delta_as_before(self._blobs, tracker))
        self._blobs.release(ref)
        for _ in range(rounds):
            learn(tracker)
            self._touch_memory()
            began = time.perf_counter()
            _, ref = put_delta(tracker, 0, self._blobs, never_interrupt)
            # training waits no longer; a member that merges reads it later
            published = time.perf_counter() - began
            self.engines.read(ref)
            read = time.perf_counter() - began
            found.append(Round(self.release(ref), published, read=read))
        return [found[0]._replace(before=before), *found[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tlt-bench-") as name:
        rank = Rank(Path(name))
        policy = rank.publish_policy(arguments.rounds)
        deltas = rank.publish_deltas(arguments.rounds)
        rank.engines.close()
    claims = [
        at_most("weights published by one rank", middle(policy, "published"), "copies", 3),
        at_most("weights published by two shards", middle(policy, "sharded"), "copies", 4),
        at_most("a delta of 226M weights published", middle(deltas, "published"), "copies", 3),
    ]
    details = {
        "weights as before, in copies": middle(policy, "before"),
        "delta as before, in copies of its half": middle(deltas, "before"),
        "delta until it is verified, in copies": middle(deltas, "read"),
        "weights": [each._asdict() for each in policy],
        "deltas": [each._asdict() for each in deltas],
    }
    write_result("weights", claims, details, time.monotonic() - began, arguments.out)


def middle(rounds: list[Round], name: str) -> float:
    """Return the median ratio to the copy of the same turn."""
    measured = [each for each in rounds if getattr(each, name) is not None]
    return round(statistics.median(each.ratio(name) for each in measured), 2)


if __name__ == "__main__":
    main()
