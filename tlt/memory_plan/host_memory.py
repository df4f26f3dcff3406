"""Count what a job takes of a host's memory: above all of /dev/shm, which its ranks share."""

from collections.abc import Iterator

import msgspec

from tlt.memory_plan.drafter_memory import merge_bytes, snapshot_bytes
from tlt.memory_plan.job_sizes import JobMemory, Spread
from tlt.memory_plan.learner_memory import layer_input

# of tlt/ranks/drafter/member.py
_POLICIES, _ROLLOUT_BYTES, _DELTAS = 3, 256 << 20, 8
# of tlt/engine/sglang/shared/shared_hidden_state_buffer.py and start_engine_with_tap.py
_COLUMNS, _PER_SLOT, _ALIGNMENT, _SLOTS_PER_REQUEST = 5, 2, 64, 2
# of tlt/engine/sglang/client/weight_parts_and_checksums.py
_PART_BYTES = 1 << 30
# weights are loaded, and kept in checkpoints, in float32
_FULL = 4


class HostItem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bytes: int
    # False for memory of the host that isn't in /dev/shm
    shared: bool = True
    note: str = ""


def host_items(job: JobMemory, spread: Spread) -> Iterator[HostItem]:
    policy_weights = job.policy.weights
    policy = _FULL * policy_weights
    published = job.engine_width * policy_weights
    ranks = spread.ranks_per_host
    engines = max(1, ranks // spread.tensor_parallel)
    yield HostItem(
        name="published policies",
        bytes=_POLICIES * published,
        note="the new, the present and the previous one, in the engines' format",
    )
    yield HostItem(name="rollouts in flight", bytes=min(policy, _ROLLOUT_BYTES))
    if job.engine == "sglang":
        yield HostItem(
            name="taps",
            bytes=engines * tap_bytes(job),
            note=f"tokens, origins and hidden states, of each of {engines} engines",
        )
        yield HostItem(
            name="weights on their way to SGLang",
            bytes=engines * min(_PART_BYTES, job.engine_width * policy_weights),
            note=f"a part of at most {_PART_BYTES >> 20} MiB for each engine",
        )
    if job.trains_drafter and job.drafter is not None:
        # weights and their mean, in float32
        delta = 2 * _FULL * job.drafter.weights
        yield HostItem(name="drafters and their deltas", bytes=_DELTAS * delta)
        yield HostItem(
            name="answers to train drafters on",
            bytes=2 * engines * (job.drafter_megabytes << 20),
            note="drafter.megabytes of each engine's rank, and as much for unfinished answers",
        )
        if spread.device == "cuda":
            kept, count = snapshot_bytes(job.drafter)
            yield HostItem(
                name="drafter training: bases and snapshots",
                bytes=engines * (kept + merge_bytes(job.drafter)),
                shared=False,
                note=f"weights and mean of two bases and {count} deltas, and a merge",
            )
    if job.offload:
        yield HostItem(
            name="inputs of checkpointed layers",
            bytes=ranks * offloaded_bytes(job, spread),
            shared=False,
            note="algorithm.gradient_checkpointing: offload; pinned, in powers of two",
        )
    sharded = spread.shards > 1
    yield HostItem(
        name="loading the policy",
        bytes=ranks * (_FULL * job.policy.embedding if sharded else policy),
        shared=False,
        note="for a moment: each rank reads "
        + ("one weight at a time" if sharded else "all of it in float32"),
    )


def offloaded_bytes(job: JobMemory, spread: Spread) -> int:
    """Return what one rank's update saves on the host, as PyTorch allocates pinned memory."""
    one = layer_input(job, spread) * job.update_tokens
    # the final norm saves its input twice, and the normalised one
    return (job.policy.layers + 3) * (1 << (one - 1).bit_length())


def most_tap_slots(job: JobMemory, shared: int) -> int:
    """Return the slots, at least one, whose tap has room in so many bytes."""
    return max(1, shared // tap_bytes(msgspec.structs.replace(job, slots=1)))


def tap_bytes(job: JobMemory) -> int:
    """Return the size of one rank's tap, as `TapShape.bytes` does."""
    slots = _SLOTS_PER_REQUEST * job.slots
    numbers = slots * (8 * _PER_SLOT + 4 * _COLUMNS * job.max_context)
    states = slots * job.max_context * job.captured * job.policy.hidden * job.engine_width
    return -(-numbers // _ALIGNMENT) * _ALIGNMENT + states
