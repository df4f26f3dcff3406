"""The dashboard's own process: one port, one loop, gone without a trace when it is told to end."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import uvicorn

from tlt.dashboard.access_guard import is_loopback
from tlt.dashboard.app import Dashboard
from tlt.dashboard.data_sources import Source
from tlt.errors import ConfigError

PORT = 8420
# tried after the first, where none was asked for
_MORE_PORTS = 20
_TOKEN_FILE = "dashboard-token"
# between two looks at whether it was told to end
_TICK_SECONDS = 0.5
# of uvicorn's own ticks: after so many the date that answers carry is renewed
_A_SECOND = 10


class _Server(uvicorn.Server):
    async def main_loop(self) -> None:
        """Its own wakes ten times a second, which costs more than a page that is told nothing."""
        while not await self.on_tick(_A_SECOND):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)


def kept_token(folder: Path) -> str:
    """The same for as long as the session's folder is there, so that an open page stays good."""
    file = folder / _TOKEN_FILE
    try:
        return file.read_text().strip()
    except FileNotFoundError:
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(24))
        return file.read_text()


def serve(
    make_source: Callable[[], Source],
    *,
    host: str,
    port: int | None,
    token: str | None,
    public: str | None = None,
    ready: Callable[[str], None],
) -> None:
    """Until it is told to end; `ready` is given the address, once it answers there.

    `public`: that of a proxy before it.
    """
    if public is not None and not _is_address(public):
        raise ConfigError(f"--public-url {public}: write https://host or https://host:port")
    loopback = is_loopback(host)
    if not loopback and not token:
        raise ConfigError(f"--host {host}: everybody there could look; give a --token, too")
    token = token or secrets.token_urlsafe(24)
    with _listen(host, port) as listener:
        found = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host

        async def run() -> None:
            source = make_source()
            dashboard = Dashboard(source, token=token, port=found, loopback=loopback, public=public)
            config = uvicorn.Config(
                dashboard.app,
                http="h11",
                ws="none",
                log_level="critical",
                access_log=False,
                server_header=False,
                # those who listen would otherwise keep it up
                timeout_graceful_shutdown=1,
            )
            server = _Server(config)
            where = (public or f"http://{shown}:{found}").rstrip("/")
            ready(f"{where}/?token={quote(token, safe='')}")
            await server.serve(sockets=[listener])

        asyncio.run(run())


def _is_address(text: str) -> bool:
    """Without a path: the page's own begin at the root."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    sound = parts.scheme in ("http", "https") and bool(parts.hostname)
    return sound and parts.path in ("", "/") and not parts.query and not parts.fragment


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port] if port is not None else [*range(PORT, PORT + _MORE_PORTS), 0]
    for each in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, each))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if each == ports[-1]:
                raise ConfigError(f"{host}:{each}: cannot listen: {error.strerror}") from error
        else:
            return listener
    raise AssertionError("there is always a last port")
