"""Choose the batch sizes for which SGLang captures CUDA graphs, count the graphs, and their memory.

For each size and draft length it captures the policy's pass, the drafter's proposals, and the pass
that keeps the drafter's cache up to date. A batch between two sizes is padded to the larger one.
SGLang's own 27 sizes up to 64 answers would make 459 graphs with six draft lengths, each of which
takes a tenth of a second or more at the start.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tlt.memory_plan.job_sizes import JobMemory, Spread

MOST_CAPTURES = 128
# more sizes save little padding
_MOST_SIZES = 16

# Estimates of a graph's memory, not measured by TLT. Each draft length has kernels of attention
# with a workspace of their own: FlashInfer's takes 384 MiB, and 512 MiB for Qwen, while SGLang's
# choice on Hopper, FlashAttention 3, has none.
_WORKSPACE = 512 << 20
# a cached token's place in the pool, and whether a token may see it
_INDEX, _MASK = 4, 1
# of the driver, for a kernel in a graph; kernels of a layer: norms, projections, rope, cache,
# attention, activation, residuals
_KERNEL_BYTES, _KERNELS = 12 << 10, 12


class Captures(NamedTuple):
    # batch sizes, rising; none if even one would take too many graphs
    sizes: tuple[int, ...]
    # graphs of each size, by what they compute
    passes: int
    proposals: int
    extensions: int

    @property
    def total(self) -> int:
        return len(self.sizes) * (self.passes + self.proposals + self.extensions)


def plan_captures(slots: int, lengths: Sequence[int]) -> Captures:
    """Choose sizes up to `slots` for draft lengths that include 0, the only one without drafts.

    There are at most `MOST_CAPTURES` graphs.
    """
    passes = len(lengths)
    # SGLang proposes a single token without a graph
    proposals = sum(length > 1 for length in lengths)
    extensions = passes if passes > 1 else 0
    most = min(_MOST_SIZES, MOST_CAPTURES // (passes + proposals + extensions))
    return Captures(_sizes(slots, most), passes, proposals, extensions)


def graph_bytes(job: JobMemory, spread: Spread) -> int:
    """Return what SGLang's graphs take on a device."""
    captures = plan_captures(job.slots, job.lengths)
    if not captures.sizes:
        return 0
    pool = _pool_bytes(job) // spread.tensor_parallel
    return len(job.lengths) * _WORKSPACE + _index_bytes(job) + pool + _kernel_bytes(job, captures)


def _sizes(slots: int, most: int) -> tuple[int, ...]:
    """Return rising sizes up to `slots`, each larger by about the same factor."""
    if most < 2 or slots == 1:
        return (slots,) * min(most, 1)
    factor = slots ** (1 / (most - 1))
    return tuple(sorted({round(factor**power) for power in range(most)}))


def _index_bytes(job: JobMemory) -> int:
    """Count the places that each pass of each draft length reads: proposals, verification, cache.

    A mask says for each verified token what it may see.
    """
    positions = job.slots * job.request_positions
    passes = sum(length + 2 for length in job.lengths)
    verified = sum(length + 1 for length in job.lengths)
    return positions * (passes * _INDEX + verified * _MASK)


def _pool_bytes(job: JobMemory) -> int:
    """Return what the largest pass takes at once: all graphs share it, logits are counted apart."""
    policy, rows = job.policy, job.slots * (job.drafts + 1)
    numbers = 4 * policy.hidden + policy.queries + 2 * policy.pairs + 3 * policy.intermediate
    return job.engine_width * rows * (numbers + job.captured * policy.hidden)


def _kernel_bytes(job: JobMemory, captures: Captures) -> int:
    """Count the layers of all graphs: the drafter has one, which a graph runs once for a draft."""
    layers = captures.passes * job.policy.layers + captures.extensions
    layers += sum(length for length in job.lengths if length > 1)
    return len(captures.sizes) * layers * _KERNELS * _KERNEL_BYTES
