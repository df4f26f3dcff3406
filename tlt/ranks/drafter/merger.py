"""Merge members' deltas into the next base, and publish it with the drafter in it."""

import time
from dataclasses import dataclass

from tlt.base.id_types import PolicyVersion
from tlt.base.interrupt_check import CheckInterrupt
from tlt.blobs.blob_files import Blobs
from tlt.models.eagle_drafter import Drafter
from tlt.models.safetensors_io import put_weights, read_weights
from tlt.protocol.commands import MergeDrafter
from tlt.protocol.events import DrafterMerged
from tlt.protocol.refs import BlobRef, DrafterBase, DrafterRef
from tlt.protocol.shared_values import DrafterEvaluation
from tlt.ranks.drafter.delta_base_reader import BaseReader, mean_of, tokens_of
from tlt.ranks.drafter.drafter_factory import DrafterFactory
from tlt.ranks.rank_job_context import RankJob
from tlt.trainer.drafter.delta_merging import BaseWeights, Delta, merge_deltas


@dataclass(frozen=True, kw_only=True)
class MergedDrafter:
    """The next base, and the drafter in it."""

    command: MergeDrafter
    weights: BaseWeights
    drafter: Drafter


class DrafterMerger:
    """Follow MergeDrafter; an interrupt leaves nothing behind."""

    def __init__(self, job: RankJob, factory: DrafterFactory, blobs: Blobs) -> None:
        self._job = job
        self._factory = factory
        self._blobs = blobs
        self._bases = BaseReader(blobs)

    def merge(
        self, command: MergeDrafter, root: BaseWeights | None, check: CheckInterrupt
    ) -> MergedDrafter:
        """Merge the command's deltas; `root` is this member's initial weights, if it has any."""
        base = self._bases.read(command.base, root, check)
        deltas = (
            Delta(
                tensors=read_weights(self._blobs, ref.blob, check),
                micro_batches=ref.micro_batches,
                previous_micro_batches=ref.previous_micro_batches,
            )
            for ref in command.deltas
        )
        learned = sum(ref.micro_batches for ref in command.deltas)
        weights = merge_deltas(base, deltas, learned, check)
        drafter = self._factory.build(mean_of(weights))
        return MergedDrafter(command=command, weights=weights, drafter=drafter)

    def publish(
        self,
        merged: MergedDrafter,
        evaluation: DrafterEvaluation,
        policy: PolicyVersion,
        began: float,
        check: CheckInterrupt,
    ) -> DrafterMerged:
        """Write the base and the drafter; `policy` is the version that it was last trained on.

        `began` is the time at which the work on the command began.
        """
        check()
        command, weights = merged.command, merged.weights
        drafter = put_weights(self._blobs, merged.drafter.state_dict(), commit=False, check=check)
        base = self._put_base(weights, drafter, command.base.weights, check)
        newest = {ref.member: (ref.number, weights.micro_batches) for ref in command.deltas}
        return DrafterMerged(
            **self._job.reporter,
            base=DrafterBase(
                version=command.version,
                root=command.base.root,
                weights=base,
                updates=weights.updates,
                micro_batches=weights.micro_batches,
                merged={**command.base.merged, **newest},
            ),
            drafter=DrafterRef(
                version=command.version,
                weights=drafter,
                policy=policy,
                architecture=self._factory.architecture,
                updates=weights.updates,
                micro_batches=weights.micro_batches,
            ),
            evaluation=evaluation,
            seconds=time.monotonic() - began,
        )

    def _put_base(
        self, base: BaseWeights, drafter: BlobRef, previous: BlobRef | None, check: CheckInterrupt
    ) -> BlobRef:
        """Write the base; if that fails, delete the drafter that was written for it."""
        try:
            tensors = {**base.tensors, **tokens_of(base)}
            return put_weights(self._blobs, tensors, commit=False, check=check)
        except Exception:
            if drafter != previous:  # equal bytes are one blob
                self._blobs.release(drafter)
            raise
