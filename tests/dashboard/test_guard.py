"""Access to the dashboard is guarded, and browsers get strict security headers."""

from pathlib import Path

import httpx
import pytest

from tests.dashboard.conftest import OURS, TOKEN, Serve
from tests.simulation.world import JOB
from tlt.dashboard.access_guard import is_loopback
from tlt.dashboard.data_sources import FolderSource, Source
from tlt.dashboard.server import serve as serve_page
from tlt.errors import ConfigError

_CANCEL = f"/api/jobs/{JOB}/cancel"


async def test_every_response_forbids_what_the_page_does_not_need(
    folder_client: httpx.AsyncClient,
) -> None:
    for path in ("/", "/static/main.js", "/api/about", "/nowhere", "/login"):
        answer = await folder_client.get(path)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"


async def test_failed_responses_have_security_headers_too(
    folder_client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.dashboard.app.exposition", lambda *_: 1 / 0)
    answer = await folder_client.get("/metrics")
    assert answer.status_code == 500
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_page_has_no_inline_code_and_loads_nothing_from_other_hosts() -> None:
    static = Path("tlt/dashboard/static")
    for page in static.glob("*.html"):
        text = page.read_text()
        assert "style=" not in text
        assert "<style" not in text
        assert "onclick" not in text
        assert all("src=" in tag.split(">")[0] for tag in text.split("<script")[1:])
    for file in (*static.glob("*.js"), *static.glob("*.css"), *static.glob("*.html")):
        text = file.read_text()
        assert "innerHTML" not in text, file
        assert "//cdn" not in text, file
        assert "https://" not in text, file
        assert "http://" not in text, file


async def test_refuses_changes_from_another_sites_page(folder_client: httpx.AsyncClient) -> None:
    """They are refused even with a valid token, as a browser may send the cookie along."""
    known = {"authorization": f"Bearer {TOKEN}"}
    for headers in (
        known,  # a form cannot send our header
        {**OURS, "origin": "https://evil.example"},
        {**OURS, "origin": "null"},
        {**OURS, "origin": "http://["},
        {**OURS, "sec-fetch-site": "cross-site"},
        {**OURS, "sec-fetch-site": "same-site"},
    ):
        answer = await folder_client.post(_CANCEL, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (403, "a request from another site")
    preflight = await folder_client.options(_CANCEL, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in preflight.headers


async def test_changes_need_the_token(folder_client: httpx.AsyncClient) -> None:
    for path in (_CANCEL, "/api/jobs"):
        refused = await folder_client.post(path, headers={"x-tlt": "1"}, json={})
        assert refused.status_code == 401
        wrong = {"x-tlt": "1", "authorization": f"Bearer {TOKEN}x"}
        assert (await folder_client.post(path, headers=wrong, json={})).status_code == 401
        passed = await folder_client.post(path, headers=OURS, json={})
        assert passed.status_code == 409  # a folder has no session


async def test_refuses_foreign_names_that_resolve_to_us(
    folder_client: httpx.AsyncClient,
) -> None:
    odd = ("127.0.0.1/login?", "127.0.0.1/static/", "evil@127.0.0.1", "127.0.0.1#")
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", *odd):
        assert (await folder_client.get("/", headers={"host": host})).status_code == 400
    for host in ("localhost:8420", "127.0.0.1:1", "[::1]:8420"):
        assert (await folder_client.get("/", headers={"host": host})).status_code == 200


async def test_token_in_the_address_becomes_an_http_only_cookie(
    folder_client: httpx.AsyncClient,
) -> None:
    stale = await folder_client.get("/", params={"token": "wrong"})
    assert (stale.status_code, stale.headers["location"]) == (303, "/")
    assert "set-cookie" not in stale.headers
    answer = await folder_client.get("/", params={"token": TOKEN})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    changed = await folder_client.post(_CANCEL, headers={"x-tlt": "1"})
    assert changed.status_code == 409


async def test_reading_from_other_hosts_needs_the_token(serve: Serve, run_folder: Path) -> None:
    client = await serve(FolderSource(run_folder), loopback=False)
    assert (await client.get("/")).headers["location"] == "/login"
    assert (await client.get("/?token=wrong")).headers["location"] == "/login"
    assert (await client.get("/login")).status_code == 200
    assert (await client.get("/static/login.js")).status_code == 200
    for path in ("/api/about", f"/api/events?job={JOB}", f"/api/jobs/{JOB}/samples"):
        assert (await client.get(path)).status_code == 401
    refused = await client.post("/login", headers={"x-tlt": "1"}, json={"token": "wrong"})
    assert refused.status_code == 401
    await client.post("/login", headers={"x-tlt": "1"}, json={"token": TOKEN})
    assert (await client.get("/api/about")).status_code == 200


async def test_reading_through_a_proxy_needs_the_token(serve: Serve, run_folder: Path) -> None:
    """All clients of a proxy seem to be on this host."""
    client = await serve(FolderSource(run_folder), public="https://tlt.example")
    through = {"host": "tlt.example"}
    assert (await client.get("/api/about", headers=through)).status_code == 401
    assert (await client.get("/api/about")).status_code == 401
    assert (await client.get("/", headers={"host": "evil.example"})).status_code == 400
    welcome = await client.get("/", params={"token": TOKEN}, headers=through)
    assert "secure" in welcome.headers["set-cookie"].lower()
    for host in (
        "tlt.example",
        f"127.0.0.1:{client.base_url.port}",
    ):
        ours = {**OURS, "host": host, "origin": "https://tlt.example"}
        assert (await client.post(_CANCEL, headers=ours, json={})).status_code == 409
        for origin in ("https://evil.example", "http://tlt.example.evil", "null"):
            answer = await client.post(_CANCEL, headers={**ours, "origin": origin}, json={})
            assert answer.status_code == 403


@pytest.mark.parametrize(
    "url", ["tlt.example", "ftp://x", "https://x/path", "https://", "https://["]
)
def test_refuses_a_public_url_that_is_no_origin(url: str, run_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--public-url"):
        serve_page(
            lambda: FolderSource(run_folder),
            host="127.0.0.1",
            port=0,
            token=None,
            public=url,
            ready=print,
        )


def test_does_not_listen_on_other_addresses_without_a_token() -> None:
    def make_source() -> Source:
        raise AssertionError("nothing may be opened")

    with pytest.raises(ConfigError, match="give a --token"):
        serve_page(make_source, host="0.0.0.0", port=0, token=None, ready=print)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/api/jobs/..%2f..%2fetc%2fpasswd/spec",
        "/api/jobs/../samples",
    ],
)
async def test_serves_no_file_outside_of_its_folder(
    folder_client: httpx.AsyncClient, path: str
) -> None:
    url = folder_client.base_url.copy_with(raw_path=path.encode())
    assert (await folder_client.get(url)).status_code == 404


def test_recognizes_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))


async def test_half_a_surrogate_pair_is_no_token(folder_client: httpx.AsyncClient) -> None:
    answer = await folder_client.post("/login", headers=OURS, content=b'{"token": "\\ud800"}')
    assert answer.status_code == 401


async def test_refuses_large_bodies_and_bodies_that_are_no_json(
    folder_client: httpx.AsyncClient,
) -> None:
    big = await folder_client.post("/api/jobs", headers=OURS, content=b"x" * (2 << 20))
    assert big.status_code in (409, 413)
    assert (await folder_client.post("/login", headers=OURS, content=b"[")).status_code == 400
    assert (await folder_client.post("/login", headers=OURS, content=b"[1]")).status_code == 400


async def test_refuses_deeply_nested_json(folder_client: httpx.AsyncClient) -> None:
    answer = await folder_client.post("/login", headers={"x-tlt": "1"}, content="[" * 400_000)
    assert answer.status_code == 400
    assert "content-security-policy" in answer.headers
