"""Execute commands in one transaction and one round trip, if a check in Redis holds.

WATCH, a read and EXEC would be three round trips, which an event's latency mostly consists of.
"""

from collections.abc import Sequence
from typing import Any

from tlt.store.redis_connection import Connection, Transaction

# Redis refuses the first write of a script when memory is short, and none of those after it.
_EXECUTE = """
local at = 3
while at <= #ARGV do
    local last = at + tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, last))
    at = last + 1
end
return false
"""
# Redis 6.2 takes commands of 2**20 words
_MOST_WORDS = 500_000


class Guard:
    """A check in Lua: it returns what it has found if the commands may not be executed.

    It reads the key KEYS[1]; ARGV[1] and ARGV[2] are its arguments.
    """

    def __init__(self, check: str) -> None:
        self._text = check + _EXECUTE

    async def execute(
        self,
        connection: Connection,
        filled: Transaction,
        key: str,
        first: str | int,
        second: str | int = "",
    ) -> bytes | None:
        """Execute the commands of a pipeline; return what the check has found if it refuses."""
        script = connection.register_script(self._text)
        parts = _parts([words for words, _ in filled.command_stack], (first, second))
        if len(parts) == 1:
            return await script(keys=[key], args=parts[0])
        async with connection.pipeline(transaction=True) as transaction:
            for part in parts:
                await script(keys=[key], args=part, client=transaction)
            return (await transaction.execute())[0]


def _parts(commands: Sequence[tuple[Any, ...]], arguments: Sequence[str | int]) -> list[list[Any]]:
    """Return the arguments of scripts that execute all commands, mostly of one."""
    parts: list[list[Any]] = [[*arguments]]
    for words in commands:
        if len(parts[-1]) + len(words) >= _MOST_WORDS:
            parts.append([*arguments])
        parts[-1] += [len(words), *words]
    return parts
