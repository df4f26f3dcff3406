"""The web application: pages, events, samples, and the two requests that change something."""

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
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tlt.base.id_types import JobId, PromptIndex, Purpose, Step
from tlt.dashboard.access_guard import AccessGuard, GuardMiddleware
from tlt.dashboard.data_sources import FolderSource, Source
from tlt.dashboard.listener_driven_feed import Feed
from tlt.dashboard.prometheus import CONTENT_TYPE, exposition
from tlt.dashboard.run_feed import RunFeed
from tlt.dashboard.session_feed import SessionFeed
from tlt.dashboard.sse import events
from tlt.errors import ConfigError, TltError
from tlt.loggers.installed_check import refuse_missing
from tlt.protocol.shared_values import JobRecord
from tlt.spec.spec_files import read_job_spec, to_yaml
from tlt.store.job_requests import ENDED_STATUSES
from tlt.store.redis_connection import CONNECTION_ERRORS

_STATIC = Path(__file__).parent / "static"
_MAX_BYTES = 1 << 20
_MAX_DIGITS = 12
_encode = msgspec.json.Encoder().encode
_log = structlog.get_logger("dashboard")


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Dashboard:
    def __init__(
        self, source: Source, *, token: str, port: int, loopback: bool, public: str | None = None
    ) -> None:
        self._source = source
        # samples are decoded one at a time, so that threads take at most one core
        self._decoding = asyncio.Lock()
        self._guard = AccessGuard(token=token, port=port, loopback=loopback, public=public)
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
                Route("/api/jobs/{job}/pause", self._pause, methods=["POST"]),
                Route("/api/jobs/{job}/resume", self._resume, methods=["POST"]),
                Route("/api/jobs/{job}/spec", self._spec),
                Route("/api/jobs/{job}/samples", self._samples),
                Route("/api/jobs/{job}/samples/{step}/{purpose}/{prompt}", self._sample),
                Mount("/static", StaticFiles(directory=_STATIC)),
            ],
            exception_handlers={
                _Refused: _explain,
                TltError: _explain,
                **dict.fromkeys((*CONNECTION_ERRORS, redis.exceptions.RedisError), _explain_redis),
            },
            lifespan=self._lifespan,
        )
        # outside of the application, so that it also covers responses to failed requests
        self.app = GuardMiddleware(app, self._guard)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        yield
        await self._source.close()

    # --- reading

    async def _page(self, _: Request) -> Response:
        return FileResponse(_STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def _login_page(self, _: Request) -> Response:
        return FileResponse(_STATIC / "login.html", headers={"cache-control": "no-store"})

    async def _about(self, request: Request) -> Response:
        """Return what the page has to know before it subscribes to events."""
        source = self._source
        return _json(
            {
                "session": source.session and source.session.spec.name,
                "run": source.job if isinstance(source, FolderSource) else None,
                "may_change": bool(request.state.may_change) and source.session is not None,
            }
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
        """Return the metrics of the session and its running jobs, or of the folder's run.

        A journal that cannot be read leaves its job out.
        """
        source, view = self._source, None
        jobs: list[JobId] = []
        if source.session is not None:
            view = await source.session.view()
            jobs = source.session.running_jobs()
        elif isinstance(source, FolderSource):
            jobs = [source.job]
        runs: list[RunFeed] = []
        for job in jobs:
            try:
                runs.append(await self._refreshed_feed(job))
            except Exception:  # a journal of another release may fail anywhere
                _log.exception("the run's metrics cannot be computed", job=job)
        return Response(exposition(view, runs), media_type=CONTENT_TYPE)

    async def _samples(self, request: Request) -> Response:
        """Return all rollout batches, and the groups of the requested or the newest one.

        By default it is a training batch: an evaluation has one answer for each prompt.
        """
        samples = (await self._refreshed_feed(request.path_params["job"])).run.samples
        batches = samples.batches()
        step, purpose = request.query_params.get("step"), request.query_params.get("purpose")
        training = [each for each in batches if each[1] == "train"]
        chosen = next(iter(training or batches), None)
        if step is not None and purpose in ("train", "eval"):
            chosen = Step(_parse_number(step)), purpose
        groups = samples.groups(*chosen) if chosen is not None else []
        return _json({"batches": batches, "chosen": chosen, "groups": groups})

    async def _sample(self, request: Request) -> Response:
        path = request.path_params
        samples = (await self._refreshed_feed(path["job"])).run.samples
        purpose = cast("Purpose", path["purpose"])
        step, prompt = _parse_number(path["step"]), _parse_number(path["prompt"])
        key = Step(step), purpose, PromptIndex(prompt)
        group = samples.group(key)
        if group is None:
            raise _Refused(404, "this group is not kept any more")
        async with self._decoding:
            return _json(await asyncio.to_thread(samples.sample, key, group))

    async def _spec(self, request: Request) -> Response:
        return _json({"yaml": to_yaml((await self._feed(request.path_params["job"])).run.spec)})

    async def _refreshed_feed(self, job: str) -> RunFeed:
        feed = await self._feed(job)
        await feed.refresh()
        return feed

    async def _feed(self, job: str) -> RunFeed:
        try:
            feed = await self._source.run(JobId(job))
        except msgspec.DecodeError as error:
            raise _Refused(500, f"the record of '{job}' cannot be read: {error}") from error
        if feed is None:
            raise _Refused(404, f"there is no job '{job}'")
        return feed

    # --- changing

    def _session(self) -> SessionFeed:
        if self._source.session is None:
            raise _Refused(409, "this is the folder of a run: there is no session to change")
        return self._source.session

    async def _submit(self, request: Request) -> Response:
        session = self._session()
        yaml = str((await _body(request)).get("yaml", ""))
        spec = read_job_spec(yaml, where="spec", folder=Path(session.spec.runs))
        refuse_missing(spec.loggers, "spec")
        record = await session.jobs.submit(spec)
        return _json({"job": record.job, "folder": record.folder})

    async def _cancel(self, request: Request) -> Response:
        session = self._session()
        record = await session.jobs.get(JobId(request.path_params["job"]))
        if record is not None and record.status not in ENDED_STATUSES:
            await session.jobs.cancel(record.job)
        return _known(request, record)

    async def _pause(self, request: Request) -> Response:
        return _known(request, await self._session().jobs.pause(request.path_params["job"]))

    async def _resume(self, request: Request) -> Response:
        return _known(request, await self._session().jobs.resume(request.path_params["job"]))

    async def _log_in(self, request: Request) -> Response:
        body = await _body(request)
        if not self._guard.accepts(str(body.get("token", ""))):
            raise _Refused(401, "this is not the token")
        return self._guard.set_cookie(_json({}))


def _known(request: Request, record: JobRecord | None) -> Response:
    """Return the status that a job had."""
    if record is None:
        raise _Refused(404, f"there is no job '{request.path_params['job']}'")
    return _json({"job": record.job, "status": record.status})


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise _Refused(404, "not the number of a step or prompt")
    return int(text)


async def _body(request: Request) -> dict[str, Any]:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BYTES:
            raise _Refused(413, "the request is too large")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Refused(400, "not a JSON object")
    return cast("dict[str, Any]", body)


def _json(value: object, status: int = 200) -> Response:
    return Response(
        _encode(value),
        status,
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )


async def _explain(_: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 500
    return _json({"error": str(error)}, error.status if isinstance(error, _Refused) else status)


async def _explain_redis(_: Request, error: Exception) -> Response:
    return _json({"error": f"the session's Redis does not answer: {error}"}, 503)
