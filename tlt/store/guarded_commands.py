"""Execute commands in one transaction and one round trip, if a check in Redis holds.

WATCH, a read and EXEC would be three round trips, which an event's latency mostly consists of.
"""

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


class Guard:
    """A check in Lua: it returns what it has found if the commands may not be executed.

    It reads the key KEYS[1]; ARGV[1] and ARGV[2] are its arguments.
    """

    def __init__(self, check: str) -> None:
        self._text = check + _EXECUTE

    async def execute(
        self, connection: Connection, filled: Transaction, key: str, *arguments: str | int
    ) -> bytes | None:
        """Execute the commands of a pipeline; return what the check has found if it refuses."""
        first, second = arguments
        flat: list[Any] = [first, second]
        for words, _ in filled.command_stack:
            flat += [len(words), *words]
        return await connection.register_script(self._text)(keys=[key], args=flat)
