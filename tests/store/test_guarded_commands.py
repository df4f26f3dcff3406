"""Commands behind a guard are executed whole or not at all."""

import pytest

from tests.store.conftest import CODEC
from tlt.base.id_types import EntryId
from tlt.store import guarded_commands
from tlt.store.guarded_commands import Guard
from tlt.store.redis_connection import Connection, WritesRefused
from tlt.store.redis_keys import COORDINATOR, Keys
from tlt.store.redis_stream import Stream

_EQUAL = Guard("""
local found = redis.call('GET', KEYS[1])
if found ~= ARGV[1] then
    return found or '0'
end
""")


async def _write(connection: Connection, keys: Keys, epoch: int, values: list[bytes]) -> object:
    filled = connection.pipeline(transaction=False)
    for value in values:
        filled.xadd(keys.events, {b"value": value})
    filled.rpush(keys.jobs, *values)
    return await _EQUAL.execute(connection, filled, keys.epoch, epoch, "")


async def test_executes_all_commands_if_the_check_holds(connection: Connection, keys: Keys) -> None:
    await connection.set(keys.epoch, 7)
    values = [b"%d\0\xff" % n for n in range(2000)]
    assert await _write(connection, keys, 7, values) is None
    assert await connection.lrange(keys.jobs, 0, -1) == values
    entries = await connection.xrange(keys.events)
    assert [fields[b"value"] for _, fields in entries] == values


@pytest.mark.parametrize("epoch", [7, 8])
async def test_divides_what_is_too_long_for_a_command(
    connection: Connection, keys: Keys, epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_commands, "_MOST_WORDS", 50)
    await connection.script_flush()
    await connection.set(keys.epoch, 7)
    filled = connection.pipeline(transaction=False)
    for n in range(100):
        filled.rpush(keys.jobs, n)
    refused = await _EQUAL.execute(connection, filled, keys.epoch, epoch)
    assert refused == (None if epoch == 7 else b"7")
    written = [int(n) for n in await connection.lrange(keys.jobs, 0, -1)]
    assert written == (list(range(100)) if epoch == 7 else [])


async def test_executes_none_otherwise(connection: Connection, keys: Keys) -> None:
    assert await _write(connection, keys, 7, [b"a"]) == b"0"
    await connection.set(keys.epoch, 8)
    assert await _write(connection, keys, 7, [b"a"]) == b"8"
    assert await connection.exists(keys.jobs, keys.events) == 0


async def test_executes_none_without_memory(connection: Connection, keys: Keys) -> None:
    await connection.set(keys.epoch, 7)
    await connection.config_set("maxmemory", 1)
    try:
        with pytest.raises(WritesRefused):
            await _write(connection, keys, 7, [b"a", b"b"])
        assert await connection.exists(keys.jobs, keys.events) == 0
    finally:
        await connection.config_set("maxmemory", 0)
    assert await _write(connection, keys, 7, [b"a", b"b"]) is None


async def test_acknowledges_a_large_backlog(connection: Connection, keys: Keys) -> None:
    stream = Stream(connection, keys.events, CODEC)
    await stream.ensure_group(COORDINATOR)
    filled = connection.pipeline(transaction=False)
    stream.acknowledge(filled, COORDINATOR, [EntryId(f"{n}-1") for n in range(20_000)])
    await connection.set(keys.epoch, 7)
    assert await _EQUAL.execute(connection, filled, keys.epoch, 7, "") is None


async def test_knows_the_script_after_a_restart(connection: Connection, keys: Keys) -> None:
    await connection.set(keys.epoch, 7)
    assert await _write(connection, keys, 7, [b"a"]) is None
    await connection.script_flush()
    assert await _write(connection, keys, 7, [b"b"]) is None
    assert await connection.lrange(keys.jobs, 0, -1) == [b"a", b"b"]
