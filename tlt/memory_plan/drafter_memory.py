"""Count what drafter training takes on a device: a member's state, a micro-batch, and a merge.

It is trained in float32, whatever the engine's format is. A micro-batch is taken to be as large as
`MicroBatchSize` allows, of one answer of max_context tokens, with torch's attention, which stores
its scores.
"""

from collections.abc import Iterator, Sequence

from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.learner_memory import CHUNK_LOGITS
from tlt.memory_plan.memory_items import Item
from tlt.memory_plan.model_shapes import DrafterShape

# bytes of a number in drafter training
_WIDTH = 4
# of tlt/ranks/drafter/micro_batch_time_limit.py
MOST_ROWS = 4096
# of tlt/trainer/drafter/hyperparameters.py: guesses that a chain is trained on
_STEPS = 4
# of tlt/ranks/drafter/merged_delta_tracker.py
_LEAST_SNAPSHOTS, _MOST_SNAPSHOTS, _SNAPSHOT_BYTES = 4, 16, 64 << 20
# of tlt/trainer/drafter/interruptible_matmul.py and chain_attention.py
_CPU_WORK, _GPU_FACTOR, _SCORE_COST = 2**30, 64, 256
_MOST_STORED = 64 << 20


def drafter_training_items(
    job: JobMemory, spread: Spread, rows: int = MOST_ROWS, chunk: int = CHUNK_LOGITS
) -> Iterator[Item]:
    drafter = job.drafter
    if drafter is None or not job.trains_drafter:
        return
    whole = _WIDTH * drafter.weights
    yield from _state(job, drafter, spread)
    activations = Activations(job, drafter, spread, min(rows, job.max_context), chunk)
    yield Item(
        name="drafter training: a micro-batch",
        bytes=max(activations.peak, 3 * whole + _WIDTH * _orthogonalised(drafter)),
        during="drafter training",
        note=f"{activations.rows} rows of an answer of max_context",
    )
    yield Item(
        name="drafter training: merging deltas",
        bytes=whole + (merge_bytes(drafter) if spread.device == "cpu" else 0),
        during="drafter merge",
        note="the merged drafter, to be evaluated",
    )


def snapshot_bytes(drafter: DrafterShape) -> tuple[int, int]:
    """Return what a member keeps of bases and deltas on the host, and of how many deltas."""
    whole = _WIDTH * drafter.weights
    kept = min(max(_LEAST_SNAPSHOTS, _SNAPSHOT_BYTES // (2 * whole)), _MOST_SNAPSHOTS)
    return (2 + kept) * 2 * whole, kept


def merge_bytes(drafter: DrafterShape) -> int:
    """Return what a merge takes on the host: two bases and a delta, of weights and mean."""
    return 3 * 2 * _WIDTH * drafter.weights


def _state(job: JobMemory, drafter: DrafterShape, spread: Spread) -> Iterator[Item]:
    yield Item(
        name="drafter training: weights, mean, moments",
        bytes=learner_state_bytes(drafter, _WIDTH),
        note="float32",
    )
    if spread.device == "cpu":
        yield Item(name="drafter training: bases and snapshots", bytes=snapshot_bytes(drafter)[0])
    yield Item(
        name="drafter training: drafter in use",
        bytes=job.engine_width * drafter.weights,
        note="beside the engine's",
    )
    if job.engine == "sglang":
        yield Item(
            name="drafter training: embedding and head",
            bytes=job.engine_width * job.policy.embedding_and_head,
            note="a second copy beside SGLang's",
        )


def learner_state_bytes(drafter: DrafterShape, width: int) -> int:
    """Return the bytes of weights, their mean, the moments and the sizes of inputs."""
    return width * (3 * drafter.weights + drafter.vectors + drafter.fusion[1])


def _orthogonalised(drafter: DrafterShape) -> int:
    """Count the numbers that Muon's iteration takes for the largest matrix."""
    rows, columns = max(drafter.matrices, key=lambda shape: shape[0] * shape[1])
    return 4 * rows * columns + 3 * min(rows, columns) ** 2


class Activations:
    """The activations of a micro-batch: `rows` chains in an answer that fills the context."""

    def __init__(
        self, job: JobMemory, drafter: DrafterShape, spread: Spread, rows: int, chunk: int
    ) -> None:
        self.rows = rows
        self._context = job.max_context
        self._drafter = drafter
        self._width = _WIDTH
        self._layers = job.captured
        self._chunk = chunk
        self._work = _CPU_WORK * (_GPU_FACTOR if spread.device == "cuda" else 1)

    @property
    def peak(self) -> int:
        """Return the most bytes at once, gradients of the drafter's weights included."""
        step, states, width = self._step_numbers, self._state_numbers, self._width
        block, gradients = 3 * self._largest_block, 2 * self._drafter.weights
        logits = 3 * self._chunk // 2
        forward = _STEPS * step + max(logits, block) + self._drafter.copied_head
        # a block that is computed again stores its scores, and repeated keys and values
        again = self._largest_block + self._repeated(self._blocks[-1:])
        again = 0 if self._stores_scores else again
        backward = (_STEPS - 1) * step + block + again + gradients
        mask = self._mask_bytes if self._stores_scores else 0
        return width * (states + max(forward, backward)) + mask

    @property
    def _stores_scores(self) -> bool:
        """Return whether the scores of a step are few enough to be stored, as `attend` does."""
        pairs = self.rows * (max(0, self._context - 2 - self.rows) + self.rows)
        return self._drafter.heads * pairs * self._width <= _MOST_STORED

    @property
    def _blocks(self) -> list[tuple[int, int]]:
        """Return rows and keys of each block of queries, as `attend` cuts them."""
        drafter, prefix = self._drafter, max(0, self._context - 2 - self.rows)
        scores = self._work // (drafter.heads * (drafter.head_dim + _SCORE_COST))
        most = max(1, scores // max(1, prefix + self.rows))
        begins = range(0, self.rows, most)
        ends = [min(begin + most, self.rows) for begin in begins]
        return [(end - begin, prefix + end) for begin, end in zip(begins, ends, strict=True)]

    @property
    def _largest_block(self) -> int:
        return max(self._drafter.heads * rows * keys for rows, keys in self._blocks)

    @property
    def _mask_bytes(self) -> int:
        return _STEPS * sum(rows * keys for rows, keys in self._blocks)

    @property
    def _step_numbers(self) -> int:
        """Count the numbers that one step of the chains leaves for the backward pass."""
        drafter = self._drafter
        queries, pairs = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim
        per_row = 8 * drafter.hidden + 2 * queries + 4 * pairs + 4 * drafter.intermediate
        if drafter.layout == "eagle3":
            # embeddings and features have norms of their own, and are joined
            per_row += 5 * drafter.hidden
        if not self._stores_scores:
            return self.rows * per_row
        scores = sum(drafter.heads * rows * keys for rows, keys in self._blocks)
        return self.rows * per_row + scores + self._repeated(self._blocks)

    def _repeated(self, blocks: Sequence[tuple[int, int]]) -> int:
        """Count keys and values, which are repeated for all heads that share them."""
        queries = self._drafter.heads * self._drafter.head_dim
        return sum(2 * queries * keys for _, keys in blocks)

    @property
    def _state_numbers(self) -> int:
        """Count the policy's states of the answer, and those that the rows start from."""
        return (self._context * self._layers + self.rows) * self._drafter.hidden
