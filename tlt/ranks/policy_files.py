"""A policy's weights and its optimiser as files of the job, of whole copies or of shards."""

import contextlib
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import TypedDict

import msgspec
import torch
from torch.distributed import ProcessGroup

from tlt.errors import ConfigError
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.models.weight_leaves import Layout, pieces_of
from tlt.protocol.refs import BlobRef, Checkpoint
from tlt.ranks.engine_requirements import engine_dtype
from tlt.ranks.rank_job_context import RankJob
from tlt.trainer.collectives import gather_bytes
from tlt.trainer.policy.adamw import METADATA
from tlt.trainer.policy.policy_learner import PolicyLearner
from tlt.trainer.process_group import wait_for_files
from tlt.trainer.shard_files import put_shards


class OptimiserFiles(TypedDict):
    """The fields of a checkpoint that name the optimiser's files."""

    optimiser: BlobRef | None
    optimiser_shards: dict[str, BlobRef]


class PolicyFiles:
    def __init__(self, job: RankJob) -> None:
        self._job = job
        self._blobs = job.blobs()
        self._decoded = engine_dtype(job.spec, job.device)
        self._restored: tuple[BlobRef, ...] = ()

    def put_weights(self, learner: PolicyLearner, rank: int, commit: bool) -> BlobRef | None:
        """Store the weights; only the first rank does, with the help of all that hold shards.

        Without `commit` only engines read them, so they have the engines' format.
        """
        dtype = torch.float32 if commit else self._decoded
        layout = Layout({name: (shape, dtype) for name, shape in learner.shapes().items()})
        if learner.is_sharded:
            return put_shards(self._blobs, learner.shards(), layout, commit=commit)
        if rank > 0:
            return None
        leaves = layout.leaves(pieces_of(layout, learner.weights().__getitem__), self._job.device)
        return self._blobs.put_leaves(leaves, commit=commit)

    def put_adapter(self, learner: PolicyLearner, rank: int, commit: bool) -> BlobRef | None:
        """Store the adapter, if there is one; only the first rank does."""
        if rank > 0 or not learner.has_adapter:
            return None
        return put_weights(self._blobs, learner.adapter(), commit=commit)

    def put_optimiser(
        self, learner: PolicyLearner, rank: int, group: ProcessGroup | None, name: str
    ) -> OptimiserFiles:
        """Store the optimiser's state; `name` is that of the update."""
        if learner.is_sharded and group is not None:
            shards = self._put_shards(learner, rank, group, name)
            return OptimiserFiles(optimiser=None, optimiser_shards=shards)
        state = None
        if rank == 0:
            state = put_weights(self._blobs, learner.optimiser_state(), commit=True)
            self._blobs.release(state)
        return OptimiserFiles(optimiser=state, optimiser_shards={})

    def restore(
        self, learner: PolicyLearner, checkpoint: Checkpoint, group: ProcessGroup | None
    ) -> None:
        """Load what any number of ranks saved."""
        self._restored = checkpoint.blobs_of_optimiser
        if learner.has_adapter:
            if checkpoint.adapter is None:
                raise ConfigError("policy.lora: the checkpoint has no adapter to go on with")
            learner.load_adapter(read_weights(self._blobs, checkpoint.adapter))
        else:
            learner.load_weights(read_weights(self._blobs, checkpoint.weights))
        if checkpoint.optimiser is not None:
            learner.load_optimiser_state(read_weights(self._blobs, checkpoint.optimiser))
            return
        with self._folder_of_shards(checkpoint.optimiser_shards, group) as folder:
            learner.load_optimiser(folder)

    def release_restored(self) -> None:
        """Free copies of the optimiser's files, once all ranks of this host have read them."""
        for ref in self._restored:
            self._blobs.release(ref)
        self._restored = ()

    def _put_shards(
        self, learner: PolicyLearner, rank: int, group: ProcessGroup, name: str
    ) -> dict[str, BlobRef]:
        # all ranks write there; where a store takes the files, those of a host
        folder = self._blobs.committed / f".checkpoint-{name}"
        if rank == 0:
            for unfinished in {*folder.parent.glob(".checkpoint-*")} - {folder}:
                shutil.rmtree(unfinished, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        learner.save_optimiser(folder)
        # each rank stores what it has written; the first one the description, too
        own = [*folder.glob(f"__{rank}_*"), *([folder / METADATA] if rank == 0 else [])]
        stored = {file.name: self._blobs.put_file(file.replace, commit=True) for file in own}
        wait_for_files()
        parts = gather_bytes(msgspec.json.encode(stored), group, self._job.device)
        for ref in stored.values():
            self._blobs.release(ref)
        with contextlib.suppress(OSError):  # another rank has removed it
            folder.rmdir()
        refs: dict[str, BlobRef] = {}
        for part in parts:
            refs |= msgspec.json.decode(part, type=dict[str, BlobRef])
        return refs

    @contextlib.contextmanager
    def _folder_of_shards(
        self, shards: dict[str, BlobRef], group: ProcessGroup | None
    ) -> Generator[Path]:
        """Give the files their names again; each rank verifies some of them."""
        world, rank = (1, 0) if group is None else (group.size(), group.rank())
        self._job.flight.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._job.flight) as name:
            for index, (file, ref) in enumerate(sorted(shards.items())):
                mine = index % world == rank
                stored = self._blobs.verify(ref) if mine else self._blobs.path(ref)
                (Path(name) / file).symlink_to(stored.resolve())
            yield Path(name)
