"""State one thing that was looked at, what was found, and what to do about it."""

from typing import Literal

import msgspec

# `missing` stops TLT, and a job learns nothing of use from what is `wrong`; with a warning it runs,
# but with less than it could have
Status = Literal["ok", "warning", "missing", "wrong"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    subject: str
    found: str
    status: Status = "ok"
    # what to do; empty if nothing has to be done
    advice: str = ""
