"""Types of the numbers and strings in messages, so that none is mistaken for another."""

from typing import Literal, NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
# Number of an incarnation of a worker's ranks; it only grows within a session. Messages of earlier
# incarnations are refused.
Incarnation = NewType("Incarnation", int)
Epoch = NewType("Epoch", int)
Step = NewType("Step", int)
Attempt = NewType("Attempt", int)
PromptIndex = NewType("PromptIndex", int)
Member = NewType("Member", int)
PolicyVersion = NewType("PolicyVersion", int)
DrafterVersion = NewType("DrafterVersion", int)
# the drafter that the job's spec names
NAMED = DrafterVersion(0)
EntryId = NewType("EntryId", str)
Digest = NewType("Digest", str)

Purpose = Literal["train", "eval"]
StopReason = Literal["stop", "length", "cancelled"]
JobStatus = Literal["queued", "preparing", "running", "paused", "done", "failed", "cancelled"]
