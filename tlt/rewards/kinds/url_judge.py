"""Ask a judge behind a URL for the reward, again if it is busy or can't be reached."""

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from tlt.data.dataset import Row
from tlt.errors import ConfigError
from tlt.spec.reward import RewardSpec

# the time limit ends the process, so it gives up a little earlier and says why
_SHARE = 0.9
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another host would get the token."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any):
        return None


_opener = urllib.request.build_opener(_NoRedirects)


class UrlJudge:
    """Post completion, answer and row as JSON; the reply is `{"reward": 0.5}`, or null in it."""

    def __init__(self, spec: RewardSpec) -> None:
        self._url = spec.url or ""
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"reward.url: '{self._url}' begins with neither http:// nor https://")
        self._seconds = _SHARE * spec.timeout_seconds
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if spec.token_variable is not None:
            token = os.environ.get(spec.token_variable)
            if token is None:
                raise ConfigError(f"reward.token_variable: {spec.token_variable} isn't set")
            self._headers["Authorization"] = f"Bearer {token}"

    def __call__(self, text: str, answer: Any, row: Row, /) -> float | None:
        body = json.dumps({"completion": text, "answer": answer, "row": row}, default=str)
        reply = json.loads(self._post(body.encode()))
        if not isinstance(reply, dict) or "reward" not in reply:
            raise ValueError(f"the reply has no reward: {str(reply)[:200]}")
        return reply["reward"]

    def _post(self, body: bytes) -> bytes:
        """Return the reply; a busy judge is asked again until the time is over."""
        deadline = time.monotonic() + self._seconds
        pause = _FIRST_PAUSE
        while True:
            left = deadline - time.monotonic()
            request = urllib.request.Request(self._url, body, self._headers)
            try:
                with _opener.open(request, timeout=max(left, 0.01)) as reply:
                    return reply.read()
            except urllib.error.HTTPError as error:
                if error.code not in _BUSY or time.monotonic() + pause > deadline:
                    raise
            except (urllib.error.URLError, HTTPException, ConnectionError, TimeoutError):
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
