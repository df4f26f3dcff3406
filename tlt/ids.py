"""Names for the numbers and strings that travel, so that none is mistaken for another."""

from typing import Literal, NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
# One life of a worker's ranks. They are numbered through the session, so a later one is larger;
# what the ranks held dies with it, and its messages are refused afterwards.
Incarnation = NewType("Incarnation", int)
Epoch = NewType("Epoch", int)
Step = NewType("Step", int)
Attempt = NewType("Attempt", int)
PromptIndex = NewType("PromptIndex", int)
Member = NewType("Member", int)
PolicyVersion = NewType("PolicyVersion", int)
DrafterVersion = NewType("DrafterVersion", int)
# the drafter that a job's spec names
NAMED = DrafterVersion(0)
EntryId = NewType("EntryId", str)
Digest = NewType("Digest", str)

Purpose = Literal["train", "eval"]
StopReason = Literal["stop", "length", "cancelled"]
JobStatus = Literal["queued", "preparing", "running", "done", "failed", "cancelled"]
