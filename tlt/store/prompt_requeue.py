"""Return prompts of a lost incarnation to the end of the queue, or to the dead letters."""

import msgspec

from tlt.base.id_types import Attempt
from tlt.errors import StoreError
from tlt.protocol.commands import PromptIssued
from tlt.store.redis_connection import Transaction
from tlt.store.redis_keys import ROLLOUT
from tlt.store.redis_stream import Stream, add_dead_letter


async def requeue(
    stream: Stream[PromptIssued],
    transaction: Transaction,
    *,
    consumer: str,
    max_tries: int,
    dead_letters: str,
    excused: bool = False,
) -> list[PromptIssued]:
    """Fill the transaction; return the prompts that are given up after `max_tries`.

    An excused loss is no try: the prompt can't have caused it.
    """
    given_up: list[PromptIssued] = []
    for entry_id, fields in await stream.pending(ROLLOUT, consumer):
        try:
            prompt = stream.codec.decode(fields)
        except StoreError as error:
            add_dead_letter(transaction, dead_letters, stream.key, fields, str(error))
        else:
            again = msgspec.structs.replace(
                prompt, attempt=Attempt(prompt.attempt + 1), excused=prompt.excused + excused
            )
            if again.attempt - again.excused < max_tries:
                stream.add(transaction, again)
            else:
                given_up.append(prompt)
                complaint = f"its worker was lost {max_tries} times"
                add_dead_letter(transaction, dead_letters, stream.key, fields, complaint)
        stream.acknowledge(transaction, ROLLOUT, [entry_id])
    return given_up
