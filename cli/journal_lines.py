"""Journal entries as log lines with the time of day."""

import time

from tlt.report import Ledger
from tlt.report.journal_log_lines import log_lines
from tlt.store.journal import JournalEntry


def timed_lines(ledger: Ledger, entry: JournalEntry) -> list[str]:
    """Add the entry to the ledger and return the lines that describe it."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.at))
    transition = ledger.add(entry.event, entry.at)
    return [f"{clock}  {line}" for line in log_lines(ledger, transition)]
