"""Find out whether a job has room to go on: on its disk, in shared memory and in Redis.

What a job needs is computed from its spec and the policy's size, or is the size of what it has
already written. A paused job goes on only when there is some room to spare.
"""

from collections.abc import Sequence

import msgspec

from tlt.base.human_format import size
from tlt.protocol.refs import Checkpoint
from tlt.spec.config import JobSpec

# room that a paused job waits for, over what it needs
SPARE = 1.25
# numbers in checkpoints are float32: a weight, and for each that is trained two moments
_FULL = 4
# an answer's token: its number, its log-probability, where it came from, and some text
_TOKEN_BYTES = 13
# policies that are published at once: the new, the present and the previous one
_POLICIES = 3
# in Redis: a prompt's token in msgpack, and the other fields of an entry; an answer is two entries
_PROMPT_TOKEN_BYTES, _ENTRY_BYTES, _ENTRIES = 5, 600, 2


class PolicySize(msgspec.Struct, frozen=True, kw_only=True):
    weights: int
    trained: int
    # bytes of a number in the engine
    width: int


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that are needed and those that are free, and what to do if they are too few."""

    # jobs share the room of a kind, wherever in it they write
    kind: str
    place: str
    free: int
    # of these, what other running jobs need
    reserved: int = 0
    bytes: int
    # what needs them, with its verb
    what: str
    remedy: str


def find_shortage(needs: Sequence[Need], spare: float = 1.0) -> str | None:
    for need in needs:
        left = need.free - need.reserved
        if left < spare * need.bytes:
            beside = ", beside what other jobs need" if need.reserved else ""
            return (
                f"{size(max(0, left))} free in {need.place}{beside}; "
                f"{need.what} {size(need.bytes)}. {need.remedy}, and the job goes on by itself"
            )
    return None


def reserve(needs: Sequence[Need], of_others: Sequence[Sequence[Need]]) -> list[Need]:
    """Reserve what other jobs need of the same kind of room."""
    others = [need for each in of_others for need in each]
    return [
        msgspec.structs.replace(
            need, reserved=sum(other.bytes for other in others if other.kind == need.kind)
        )
        for need in needs
    ]


def checkpoint_bytes(spec: JobSpec, policy: PolicySize, last: Checkpoint | None) -> int:
    """Return the size of the next checkpoint, which is written beside the last one."""
    if last is not None:
        return sum(blob.bytes for blob in last.blobs)
    return _FULL * (policy.weights + 2 * policy.trained) if spec.algorithm.steps > 0 else 0


def answer_bytes(spec: JobSpec) -> int:
    """Return the size of a step's answers in their files."""
    return spec.issued_answers * spec.rollout.max_new_tokens * _TOKEN_BYTES


def shared_memory_bytes(spec: JobSpec, policy: PolicySize, *, started: bool) -> int:
    """Return the size of the policies that are still to be published side by side.

    Those that checkpoints keep are counted as parts of these.
    """
    between = max(0, min(spec.algorithm.checkpoint_every, spec.algorithm.steps) - 1)
    return policy.width * policy.weights * min(between, 1 if started else _POLICIES)


def redis_bytes(spec: JobSpec) -> int:
    """Return what the prompts and answers of one step take in Redis."""
    tokens = spec.data.max_prompt_tokens or spec.policy.max_context or 0
    return spec.issued_answers * _ENTRIES * (tokens * _PROMPT_TOKEN_BYTES + _ENTRY_BYTES)
