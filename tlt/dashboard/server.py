"""The dashboard's own process: one port and one event loop, until it is stopped."""

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
# ports tried after the first if none was given
_MORE_PORTS = 20
_TOKEN_FILE = "dashboard-token"
# between two checks whether to end
_TICK_SECONDS = 0.5
# uvicorn renews the date of its responses when its tick count is a multiple of this
_UVICORN_TICKS = 10


class _Server(uvicorn.Server):
    async def main_loop(self) -> None:
        """Tick twice a second; uvicorn's ten times cost more than an idle page does."""
        while not await self.on_tick(_UVICORN_TICKS):  # noqa: ASYNC110
            await asyncio.sleep(_TICK_SECONDS)


def session_token(folder: Path) -> str:
    """Return the session's token, which stays the same so that an open page keeps working."""
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
    """Serve until the process is stopped; call `ready` with the address once the port is open.

    `public` is the address of a proxy in front of the dashboard.
    """
    if public is not None and not _is_origin(public):
        raise ConfigError(f"--public-url {public}: write https://host or https://host:port")
    loopback = is_loopback(host)
    if not loopback and not token:
        raise ConfigError(f"--host {host}: anyone on that network could read it; give a --token")
    token = token or secrets.token_urlsafe(24)
    with _listen(host, port) as listener:
        bound_port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        address = (public or f"http://{shown}:{bound_port}").rstrip("/")

        async def run() -> None:
            dashboard = Dashboard(
                make_source(), token=token, port=bound_port, loopback=loopback, public=public
            )
            config = uvicorn.Config(
                dashboard.app,
                http="h11",
                ws="none",
                log_level="critical",
                access_log=False,
                server_header=False,
                # open event streams would otherwise keep it running
                timeout_graceful_shutdown=1,
            )
            ready(f"{address}/?token={quote(token, safe='')}")
            await _Server(config).serve(sockets=[listener])

        asyncio.run(run())


def _is_origin(text: str) -> bool:
    """Return True for a URL without a path: the page's own paths begin at the root."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    return valid and parts.path in ("", "/") and not parts.query and not parts.fragment


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
