"""Who may ask, and from where.

On the host's own address everybody on it may look; on any other, and behind a proxy, through which
all seem to be on this host, nobody without the token. Changing something always takes the token,
and a request that a page of ours made: no other site can send our header, and browsers name the
site that asks. A page of another name that resolves to our address is refused by the name that it
asks for.
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-tlt"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
# what is shown to somebody without a token: it holds nothing but a field for it
_OPEN = ("/static/", "/login")


class Guard:
    """`public`: the address of a proxy before it, as browsers write it."""

    def __init__(self, *, token: str, port: int, loopback: bool, public: str | None = None) -> None:
        self._token = token
        self._public = None if public is None else urlsplit(public)
        # cookies are shared between the ports of a host
        self._cookie = f"tlt-{port}"
        self._loopback = loopback

    def judge(self, request: Request) -> Response | None:
        """None: it may pass."""
        if self._loopback and not self._is_named(request.headers.get("host", "")):
            return _refused(400, "this page answers to its own address only")
        offered = request.query_params.get("token")
        if offered is not None and request.method == "GET" and request.scope["path"] == "/":
            return self._log_in(offered)
        known = self._knows_token(request)
        if request.method not in ("GET", "HEAD"):
            if not self._is_ours(request.headers):
                return _refused(403, "a request from another site")
            if request.scope["path"] != "/login" and not known:
                return _refused(401, "the token is needed: open the address that tlt printed")
        elif not self._open_to_all and not known:
            path = request.scope["path"]
            if path == "/":
                return RedirectResponse("/login", status_code=303)
            if not path.startswith(_OPEN):
                return _refused(401, "the token is needed")
        request.state.may_change = known
        return None

    def accepts(self, token: str) -> bool:
        # JSON may hold half a character
        return hmac.compare_digest(token.encode(errors="surrogatepass"), self._token.encode())

    def remember(self, response: Response) -> Response:
        response.set_cookie(
            self._cookie,
            self._token,
            httponly=True,
            samesite="strict",
            max_age=30 * 86400,
            secure=self._public is not None and self._public.scheme == "https",
        )
        return response

    def _log_in(self, token: str) -> Response:
        """The token leaves the address line for a cookie that no script reads.

        An address of last week's still shows what may be seen without one.
        """
        if not self.accepts(token):
            return RedirectResponse("/" if self._open_to_all else "/login", status_code=303)
        return self.remember(RedirectResponse("/", status_code=303))

    @property
    def _open_to_all(self) -> bool:
        return self._loopback and self._public is None

    def _is_named(self, host: str) -> bool:
        return _names_loopback(host) or (self._public is not None and host == self._public.netloc)

    def _is_ours(self, headers: Headers) -> bool:
        """No other site's page can set our header without being asked first, and we never agree."""
        if headers.get(HEADER) is None:
            return False
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        try:
            asked, public = urlsplit(origin), self._public
        except ValueError:
            return False
        if public is not None and (asked.scheme, asked.netloc) == (public.scheme, public.netloc):
            return True
        return asked.netloc == headers.get("host")

    def _knows_token(self, request: Request) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.accepts(bearer):
            return True
        return self.accepts(request.cookies.get(self._cookie, ""))


class Guarded:
    """What the guard lets pass, and what every answer says of itself."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        request = Request(scope)
        answer = self._guard.judge(request)
        await (answer or self._app)(scope, receive, send_guarded)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names_loopback(host: str) -> bool:
    if set(host) & set("/?#@\\"):
        return False  # more than a name and a port
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"error": why}, status_code=status)
