"""What a dead incarnation held goes back to the end of the queue, or to the dead letters."""

import msgspec

from tlt.errors import StoreError
from tlt.ids import Attempt
from tlt.protocol.commands import PromptIssued
from tlt.store.redis_connection import Transaction
from tlt.store.redis_stream import Stream, bury


async def requeue(
    stream: Stream[PromptIssued],
    transaction: Transaction,
    *,
    group: str,
    dead: str,
    max_tries: int,
    dead_letters: str,
) -> list[PromptIssued]:
    """Fills the transaction; returns the prompts that were given up after `max_tries`."""
    given_up: list[PromptIssued] = []
    for entry_id, fields in await stream.held_by(group, dead):
        try:
            held = stream.codec.decode(fields)
        except StoreError as error:
            bury(transaction, dead_letters, stream.key, fields, str(error))
        else:
            again = msgspec.structs.replace(held, attempt=Attempt(held.attempt + 1))
            if again.attempt < max_tries:
                stream.add(transaction, again)
            else:
                given_up.append(held)
                complaint = f"its worker was lost {max_tries} times"
                bury(transaction, dead_letters, stream.key, fields, complaint)
        stream.acknowledge(transaction, group, [entry_id])
    return given_up
