"""Types of the numbers and strings in messages, so that none is mistaken for another.

Bounds and patterns hold for what is read from a stream, a socket or a journal: no name leads out of
its folder, no sum overflows, and no number lacks a form in JSON.
"""

from typing import Annotated, Literal, NewType

import msgspec

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
# "turns": an environment answered as often as it may
StopReason = Literal["stop", "length", "turns", "cancelled"]
JobStatus = Literal["queued", "preparing", "running", "paused", "done", "failed", "cancelled"]

# a job's name is a part of paths and of patterns of Redis keys
JobName = Annotated[JobId, msgspec.Meta(pattern=r"^(?!\.\.?\Z)[\w.-]+\Z")]
# printable ASCII without slashes
FILE_NAME = msgspec.Meta(pattern=r"^(?!\.\.?\Z)[ -.0-~]{1,255}\Z")
FileName = Annotated[str, FILE_NAME]
# empty in a recording that has left the file out
OptionalFileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.\.?\Z)[ -.0-~]{0,255}\Z")]
PathName = Annotated[str, msgspec.Meta(pattern=r"^[^\0]+\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
# what is still finite when it is squared; NaN isn't within
LARGEST = 1e100
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
