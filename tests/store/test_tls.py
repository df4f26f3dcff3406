"""A Redis with TLS: whom the client believes, and what it shows of itself."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tls_redis import TlsRedis, certify
from tests.tools import require_tools
from tlt.errors import StoreError
from tlt.store.redis_connection import check, connect

PASSWORD = secrets.token_hex(16)


@pytest.fixture(autouse=True)
def _programs() -> None:
    require_tools("redis-server", "openssl")


@pytest.fixture
def server(short_folder: Path) -> Iterator[TlsRedis]:
    with TlsRedis(short_folder, PASSWORD) as server:
        yield server


async def complaint(url: str) -> str | None:
    """Return what `tlt up` would say of the Redis at this URL, or None if it would use it."""
    async with connect(url) as client:
        try:
            await check(client, url)
        except StoreError as error:
            return str(error)
    return None


async def test_refuses_without_its_password_or_certificate(
    server: TlsRedis, tmp_path: Path
) -> None:
    assert await complaint(server.trusted_url) is None
    certify(tmp_path / "other.crt", tmp_path / "other.key")
    for url, expected in (
        (server.url("wrong", ssl_ca_certs=server.certificate), "refuses the password"),
        (server.url("", ssl_ca_certs=server.certificate), "refuses the password"),
        (server.url(ssl_ca_certs=tmp_path / "other.crt"), "certificate verify failed"),
        (server.url(), "certificate verify failed"),
        (server.url(scheme="redis"), "no Redis answers"),
    ):
        said = await complaint(url)
        assert said is not None
        assert expected in said
        assert PASSWORD not in said


async def test_refuses_a_certificate_of_another_name(short_folder: Path) -> None:
    with TlsRedis(short_folder, PASSWORD, name="DNS:other.example") as server:
        said = await complaint(server.trusted_url)
        assert said is not None
        assert "is not valid for '127.0.0.1'" in said
        # its authority alone would do
        assert await complaint(f"{server.trusted_url}&ssl_check_hostname=false") is None


async def test_shows_a_certificate_of_its_own_to_a_server_that_asks(short_folder: Path) -> None:
    with TlsRedis(short_folder, PASSWORD, clients=True) as server:
        own = f"&ssl_certfile={server.certificate}&ssl_keyfile={server.key}"
        assert await complaint(server.trusted_url + own) is None
        assert "no Redis answers" in (await complaint(server.trusted_url) or "")
        certify(short_folder / "other.crt", short_folder / "other.key")
        other = f"&ssl_certfile={short_folder}/other.crt&ssl_keyfile={short_folder}/other.key"
        assert "no Redis answers" in (await complaint(server.trusted_url + other) or "")


async def test_reads_a_password_with_percent_signs(short_folder: Path) -> None:
    with TlsRedis(short_folder, "a/b?c#d@e") as server:
        written = server.url("a%2Fb%3Fc%23d%40e", ssl_ca_certs=server.certificate)
        assert await complaint(written) is None
