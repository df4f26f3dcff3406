"""Tell people why a job is paused, and since when."""

from tlt.base.human_format import seconds
from tlt.protocol.shared_values import JobRecord


def describe_pause(record: JobRecord, now: float) -> str | None:
    """Return None for a job that isn't paused."""
    if record.status != "paused" or record.pause is None:
        return None
    since = f"paused for {seconds(max(0.0, now - record.pause.since))}"
    if record.pause.shortage is not None:
        return f"{since}: {record.pause.shortage}"
    return f"{since}, until `tlt resume {record.job}`"
