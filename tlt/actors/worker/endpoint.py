"""Serve turns of the policy to agents: OpenAI's chat protocol and vLLM's token protocol.

It listens on a Unix socket in a folder of its own. Each answer has a token, which opens this answer
alone and only as long as its agent runs: as the key, or as the model of a client that has the key
which several answers share.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from tlt.environments import openai_protocol as protocol
from tlt.environments.openai_protocol import Asked, Refused, Written
from tlt.isolation.fork_server_client import ScratchFolder

_MOST_BYTES = 64 << 20
_BACKLOG = 1024
_SOCKET = "http"


class Speaker(Protocol):
    """Writes the turns of one answer."""

    async def write(self, asked: Asked, is_gone: Callable[[], Awaitable[bool]]) -> Written:
        """Return the next turn, or raise Refused, as it does if the client is gone by then."""
        ...


class Endpoint:
    def __init__(self, context: int | None) -> None:
        """Say to agents that the policy reads `context` tokens; None: unknown."""
        self._context = context
        # opens nothing alone: who has it names the answer's token as the model
        self.shared_key = secrets.token_urlsafe(32)
        self._speakers: dict[str, Speaker] = {}
        self._folder: ScratchFolder | None = None
        self._state = ServerState()
        self._start: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    @property
    def path(self) -> str:
        """Return the path of the socket, at which it listens from now on."""
        if self._folder is None:
            self._folder = ScratchFolder()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"{self._folder.path}/{_SOCKET}")
            listener.listen(_BACKLOG)
            self._start = asyncio.create_task(self._serve(listener))
        return f"{self._folder.path}/{_SOCKET}"

    def admit(self, speaker: Speaker) -> str:
        """Return a token that opens an answer."""
        # programs may get it as an argument, which must not begin with a dash
        token = f"answer-{secrets.token_urlsafe(32)}"
        self._speakers[token] = speaker
        return token

    def dismiss(self, token: str) -> None:
        self._speakers.pop(token, None)

    def close(self) -> None:
        self._speakers.clear()
        if self._start is not None:
            self._start.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            assert isinstance(connection, H11Protocol)
            connection.transport.abort()
        if self._folder is not None:
            self._folder.remove()
        self._start = self._server = self._folder = None

    async def _serve(self, listener: socket.socket) -> None:
        config = uvicorn.Config(
            self._app(),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            # longer than clients keep connections
            timeout_keep_alive=75,
        )
        config.load()
        loop = asyncio.get_running_loop()
        # a server of uvicorn's own would handle signals and tick
        self._server = await loop.create_unix_server(
            lambda: H11Protocol(config, self._state, {}, loop), sock=listener
        )

    def _app(self) -> Starlette:
        posts = {
            "/v1/chat/completions": self._chat,
            "/inference/v1/generate": self._generate,
            "/v1/inference/v1/generate": self._generate,
        }
        return Starlette(
            routes=[
                Route("/v1/models", _answered(self._models)),
                *(Route(path, _answered(call), methods=["POST"]) for path, call in posts.items()),
            ],
            exception_handlers={HTTPException: _refuse_http},
        )

    async def _models(self, request: Request) -> Response:
        self._speaker(_key(request))
        card = {"id": protocol.MODEL, "object": "model", "created": 0, "owned_by": "tlt"}
        if self._context is not None:
            card["max_model_len"] = self._context
        return _json({"object": "list", "data": [card]})

    async def _chat(self, request: Request) -> Response:
        is_shared = _key(request) == self.shared_key
        speaker = None if is_shared else self._speaker(_key(request))
        chat, asked = protocol.read_chat(await _body(request))
        speaker = speaker or self._speaker(chat.model)
        turn = await speaker.write(asked, request.is_disconnected)
        message = protocol.said(turn, asked.tools)
        if not chat.stream:
            return _json(protocol.chat_answer(chat, turn, message))
        return StreamingResponse(
            _events(protocol.chat_chunks(chat, turn, message)), media_type="text/event-stream"
        )

    async def _generate(self, request: Request) -> Response:
        speaker = self._speaker(_key(request))
        generate, asked = protocol.read_generate(await _body(request))
        turn = await speaker.write(asked, request.is_disconnected)
        return _json(protocol.generate_answer(generate, turn))

    def _speaker(self, token: str) -> Speaker:
        speaker = self._speakers.get(token)
        if speaker is None:
            raise Refused("the key opens no answer that is being written", 401, "invalid_api_key")
        return speaker


_Call = Callable[[Request], Coroutine[Any, Any, Response]]


def _answered(call: _Call) -> _Call:
    """Answer what is refused as OpenAI's servers do."""

    async def answer(request: Request) -> Response:
        try:
            return await call(request)
        except Refused as refused:
            return _json(refused.body(), refused.status)
        except ClientDisconnect:
            return Response(status_code=499)

    return answer


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(Refused(error.detail, error.status_code, "not_found").body(), error.status_code)


def _key(request: Request) -> str:
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


async def _body(request: Request) -> bytes:
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > _MOST_BYTES:
            raise Refused(f"the body has more than {_MOST_BYTES} bytes", 413, "too_large")
        parts.append(part)
    return b"".join(parts)


async def _events(chunks: Iterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
