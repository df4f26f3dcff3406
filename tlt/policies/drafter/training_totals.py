"""Counts of the drafter's training so far: sessions, micro-batches, tokens and seconds."""

import msgspec

from tlt.base.id_types import PromptIndex, Step
from tlt.protocol.events import DrafterDeltaReady

# micro-batches a second and member, before any was measured
_USUAL_RATE = 10.0
# Reading answers more often than this in reserved time teaches little: on the answers to 3 prompts
# 5 s of training come to an accept length of 2.7, on those to 12 prompts to 3.9.
_READINGS = 2
# tokens of a micro-batch, before any was measured
_USUAL_TOKENS = 1024.0


class TrainingProgress(msgspec.Struct, frozen=True, kw_only=True):
    # number of training sessions begun, which is also the newest one's number
    sessions: int = 0
    # prompts of this step and the one before whose answers evaluate drafters
    held_out: dict[Step, tuple[PromptIndex, ...]] = {}
    # tokens of all answers that are not held out, over all steps
    answer_tokens: int = 0
    # micro-batches of all members, the tokens they read, and their seconds
    micro_batches: int = 0
    tokens_read: int = 0
    seconds: float = 0.0
    # micro-batches outside of reserved time
    idle_micro_batches: int = 0
    # reserved seconds that are left, added up over the members
    reserved_seconds: float = 0.0

    @property
    def newest_step(self) -> Step:
        """Return the last step with answers to train on; an evaluation adds none."""
        return max(self.held_out, default=Step(0))

    @property
    def reserved_micro_batches(self) -> int:
        return self.micro_batches - self.idle_micro_batches

    @property
    def micro_batch_rate(self) -> float:
        """Return one member's micro-batches a second."""
        if self.micro_batches == 0 or self.seconds <= 0.0:
            return _USUAL_RATE
        return self.micro_batches / self.seconds

    @property
    def learnable_micro_batches(self) -> float:
        """Return the micro-batches until reading the answers again would teach little."""
        measured = self.micro_batches > 0 and self.tokens_read > 0
        tokens = self.tokens_read / self.micro_batches if measured else _USUAL_TOKENS
        return max(0.0, _READINGS * self.answer_tokens - self.tokens_read) / tokens


def count_delta(
    progress: TrainingProgress, event: DrafterDeltaReady, reserved: bool
) -> TrainingProgress:
    return msgspec.structs.replace(
        progress,
        micro_batches=progress.micro_batches + event.updates,
        tokens_read=progress.tokens_read + event.tokens.total,
        idle_micro_batches=progress.idle_micro_batches + (0 if reserved else event.updates),
        seconds=progress.seconds + event.seconds + event.reading_seconds,
        reserved_seconds=max(
            0.0, progress.reserved_seconds - event.seconds - event.reading_seconds
        ),
    )
