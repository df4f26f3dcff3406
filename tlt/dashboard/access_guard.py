"""Rules for reading and changing, by address, token and origin.

On a loopback address every user of the machine may read. On any other address, and behind a proxy
(whose clients all seem to be on this machine), reading takes the token. A change always takes the
token and a request from our own page: other sites can't send our header, and browsers name the site
that asks. A page of another name that resolves to our address (DNS rebinding) is refused by its
Host header.
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
# readable without a token: the login page has only a field for it
_PUBLIC_PATHS = ("/static/", "/login")


class AccessGuard:
    """Checks requests; `public` is the address of a proxy in front, as browsers write it."""

    def __init__(self, *, token: str, port: int, loopback: bool, public: str | None = None) -> None:
        self._token = token
        self._public = None if public is None else urlsplit(public)
        # the port is in the name because cookies are shared between the ports of a host
        self._cookie = f"tlt-{port}"
        self._loopback = loopback

    def check(self, request: Request) -> Response | None:
        """Return the refusal or redirect, or None if the request may pass."""
        if self._loopback and not self._is_our_host(request.headers.get("host", "")):
            return _refused(400, "this page answers to its own address only")
        offered = request.query_params.get("token")
        if offered is not None and request.method == "GET" and request.scope["path"] == "/":
            return self._log_in(offered)
        has_token = self._has_token(request)
        if request.method not in ("GET", "HEAD"):
            if not self._is_same_site(request.headers):
                return _refused(403, "a request from another site")
            if request.scope["path"] != "/login" and not has_token:
                return _refused(401, "the token is needed: open the address that tlt printed")
        elif not self._reads_are_open and not has_token:
            path = request.scope["path"]
            if path == "/":
                return RedirectResponse("/login", status_code=303)
            if not path.startswith(_PUBLIC_PATHS):
                return _refused(401, "the token is needed")
        request.state.may_change = has_token
        return None

    def accepts(self, token: str) -> bool:
        # a JSON string may hold half a surrogate pair
        return hmac.compare_digest(token.encode(errors="surrogatepass"), self._token.encode())

    def set_cookie(self, response: Response) -> Response:
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
        """Move the token from the address into a cookie that no script can read.

        An address with an outdated token still shows what may be read without one.
        """
        if not self.accepts(token):
            return RedirectResponse("/" if self._reads_are_open else "/login", status_code=303)
        return self.set_cookie(RedirectResponse("/", status_code=303))

    @property
    def _reads_are_open(self) -> bool:
        return self._loopback and self._public is None

    def _is_our_host(self, host: str) -> bool:
        return _names_loopback(host) or (self._public is not None and host == self._public.netloc)

    def _is_same_site(self, headers: Headers) -> bool:
        """Return True if our page sent it: others need a preflight for our header, and get none."""
        if headers.get(HEADER) is None:
            return False
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return False
        origin = headers.get("origin")
        if origin is None:
            return True
        try:
            sender, public = urlsplit(origin), self._public
        except ValueError:
            return False
        if public is not None and (sender.scheme, sender.netloc) == (public.scheme, public.netloc):
            return True
        return sender.netloc == headers.get("host")

    def _has_token(self, request: Request) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.accepts(bearer):
            return True
        return self.accepts(request.cookies.get(self._cookie, ""))


class GuardMiddleware:
    """Passes on what the guard allows, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, guard: AccessGuard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        refusal = self._guard.check(Request(scope))
        await (refusal or self._app)(scope, receive, send_with_headers)


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
