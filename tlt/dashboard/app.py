"""The web application: pages, events, samples, and the two things that change something."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import msgspec
import redis.exceptions
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tlt.dashboard.access_guard import Guard, Guarded
from tlt.dashboard.data_sources import FolderSource, Source
from tlt.dashboard.prometheus import CONTENT_TYPE, exposition
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.sse import Feed, events
from tlt.errors import ConfigError, TltError
from tlt.ids import JobId, PromptIndex, Purpose, Step
from tlt.loggers.installed_check import refuse_missing
from tlt.spec_files import read_job_spec, to_yaml
from tlt.store.job_records import ENDED
from tlt.store.redis_connection import GONE

_STATIC = Path(__file__).parent / "static"
_MOST_BYTES = 1 << 20
_DIGITS = 12
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class _Refused(Exception):
    """What is asked for cannot be done, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Dashboard:
    def __init__(
        self, source: Source, *, token: str, port: int, loopback: bool, public: str | None = None
    ) -> None:
        self._source = source
        # one at a time: its threads may not take more than a core together
        self._decoding = asyncio.Lock()
        self._guard = guard = Guard(token=token, port=port, loopback=loopback, public=public)
        app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/login", self._login_page, methods=["GET"]),
                Route("/login", self._log_in, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/api/about", self._about),
                Route("/api/events", self._events),
                Route("/api/jobs", self._submit, methods=["POST"]),
                Route("/api/jobs/{job}/cancel", self._cancel, methods=["POST"]),
                Route("/api/jobs/{job}/spec", self._spec),
                Route("/api/jobs/{job}/samples", self._samples),
                Route("/api/jobs/{job}/samples/{step}/{purpose}/{prompt}", self._sample),
                Mount("/static", StaticFiles(directory=_STATIC)),
            ],
            exception_handlers={_Refused: _explain, TltError: _explain_ours},
            lifespan=self._lifespan,
        )
        # around what answers when a handler fails, too
        self.app = Guarded(app, guard)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        yield
        await self._source.close()

    # --- looking

    async def _page(self, _: Request) -> Response:
        return FileResponse(_STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def _login_page(self, _: Request) -> Response:
        return FileResponse(_STATIC / "login.html", headers={"cache-control": "no-store"})

    async def _about(self, request: Request) -> Response:
        """What the page has to know before it listens."""
        source = self._source
        job = source.job if isinstance(source, FolderSource) else None
        return JSONResponse(
            {
                "session": source.session and source.session.spec.name,
                "run": job,
                "may_change": bool(request.state.may_change) and source.session is not None,
            },
            headers={"cache-control": "no-store"},
        )

    async def _events(self, request: Request) -> Response:
        feeds: dict[str, Feed] = {}
        if self._source.session is not None:
            feeds["session"] = self._source.session
        job = request.query_params.get("job")
        if job is not None:
            feeds["run"] = await self._feed(job)
        return StreamingResponse(
            events(feeds, request.headers.get("last-event-id")),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _metrics(self, _: Request) -> Response:
        """Of the session and the job that runs, or of the run that is shown.

        A journal that cannot be read leaves the session's figures alone.
        """
        source, view, job = self._source, None, None
        if source.session is not None:
            view = await source.session.view()
            job = next((line.job for line in view.jobs if line.status == "running"), None)
        elif isinstance(source, FolderSource):
            job = source.job
        run = None
        try:
            run = None if job is None else await self._run(job)
        except Exception:  # what another release wrote may fail anywhere
            _log.exception("the run's figures cannot be told")
        return Response(exposition(view, run), media_type=CONTENT_TYPE)

    async def _samples(self, request: Request) -> Response:
        """The rounds, and the groups of one: the one that is asked for, or the newest.

        An evaluation has one answer a prompt, with nothing beside it.
        """
        samples = (await self._run(request.path_params["job"])).run.samples
        rounds = samples.rounds()
        step, purpose = request.query_params.get("step"), request.query_params.get("purpose")
        trained = [each for each in rounds if each[1] == "train"]
        chosen = next(iter(trained or rounds), None)
        if step is not None and purpose in ("train", "eval"):
            chosen = Step(_number(step)), purpose
        groups = samples.groups(*chosen) if chosen is not None else []
        return _json({"rounds": rounds, "chosen": chosen, "groups": groups})

    async def _sample(self, request: Request) -> Response:
        asked = request.path_params
        run = (await self._run(asked["job"])).run
        purpose = cast("Purpose", asked["purpose"])
        key = Step(_number(asked["step"])), purpose, PromptIndex(_number(asked["prompt"]))
        group = run.samples.remembered(*key)
        if group is None:
            raise _Refused(404, "this group is not remembered any more")
        async with self._decoding:
            return _json(await asyncio.to_thread(run.samples.sample, *key, group))

    async def _spec(self, request: Request) -> Response:
        return JSONResponse(
            {"yaml": to_yaml((await self._feed(request.path_params["job"])).run.spec)}
        )

    async def _run(self, job: str) -> RunFeed:
        """Read up to now."""
        feed = await self._feed(job)
        await feed.refresh()
        return feed

    async def _feed(self, job: str) -> RunFeed:
        try:
            feed = await self._source.run(JobId(job))
        except (*GONE, redis.exceptions.RedisError) as error:
            raise _Refused(503, f"the session's Redis does not answer: {error}") from error
        except msgspec.DecodeError as error:
            raise _Refused(500, f"the record of '{job}' cannot be read: {error}") from error
        if feed is None:
            raise _Refused(404, f"there is no job '{job}'")
        return feed

    # --- changing

    async def _submit(self, request: Request) -> Response:
        session = self._source.session
        if session is None:
            raise _Refused(409, "a run's folder is shown, there is no session to submit to")
        body = await _body(request)
        yaml = str(body.get("yaml", ""))
        spec = read_job_spec(yaml, where="spec", folder=Path(session.spec.runs))
        refuse_missing(spec.loggers, "spec")
        try:
            record = await session.jobs.submit(spec)
        except (*GONE, redis.exceptions.RedisError) as error:
            raise _Refused(503, f"the session's Redis does not answer: {error}") from error
        return JSONResponse({"job": record.job, "folder": record.folder})

    async def _cancel(self, request: Request) -> Response:
        session = self._source.session
        if session is None:
            raise _Refused(409, "a run's folder is shown, there is no session to ask")
        job = JobId(request.path_params["job"])
        try:
            record = await session.jobs.get(job)
            if record is None:
                raise _Refused(404, f"there is no job '{job}'")
            if record.status not in ENDED:
                await session.jobs.cancel(job)
        except (*GONE, redis.exceptions.RedisError) as error:
            raise _Refused(503, f"the session's Redis does not answer: {error}") from error
        return JSONResponse({"job": job, "status": record.status})

    async def _log_in(self, request: Request) -> Response:
        body = await _body(request)
        if not self._guard.accepts(str(body.get("token", ""))):
            raise _Refused(401, "this is not the token")
        return self._guard.remember(JSONResponse({}))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise _Refused(404, "that is no number of a step or a prompt")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MOST_BYTES:
            raise _Refused(413, "that is too much")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(400, "not a JSON object")
    return cast("dict[str, Any]", body)


def _json(value: Any) -> Response:
    return Response(
        _encode(value), media_type="application/json", headers={"cache-control": "no-store"}
    )


async def _explain(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, _Refused) else 500
    return JSONResponse({"error": str(error)}, status_code=status)


async def _explain_ours(_: Request, error: Exception) -> Response:
    return JSONResponse(
        {"error": str(error)}, status_code=400 if isinstance(error, ConfigError) else 500
    )
