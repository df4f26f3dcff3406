"""Start the program that runs tasks of verifiers, in the process that a fork server limits."""

import json
import os
import signal
import subprocess

import msgspec

from tlt.base.verifiers_interpreter import runner_command, runner_variables
from tlt.environments.environment_messages import Serve, Serving
from tlt.environments.loopback_forwarder import LoopbackForwarder
from tlt.isolation.error_text import describe
from tlt.isolation.fork_server import Reply
from tlt.spec.environment import EnvironmentSpec

_serve = msgspec.json.Decoder(Serve)


class VerifiersCalls:
    """Answers its one request when the program serves; it runs as long as this process."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec

    def answer(self, body: bytes) -> Reply:
        request = _serve.decode(body)
        try:
            return Reply(self._start(request), ends_others=False)
        except (OSError, ValueError) as error:
            return Reply(Serving(error=describe(error, "environment")))

    def _start(self, request: Serve) -> Serving:
        assert self._spec.python is not None
        path = f"{os.getcwd()}/tasks"
        settings = {
            "env": {**self._spec.env, "taskset": self._spec.verifiers_taskset},
            "base_url": f"http://127.0.0.1:{LoopbackForwarder(request.endpoint).port}/v1",
            "key": request.key,
            "socket": path,
        }
        running = subprocess.Popen(
            runner_command(self._spec.python, "serve"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=runner_variables(self._spec.python),
        )
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps(settings).encode())
        running.stdin.close()
        said = running.stdout.readline()
        # what episodes leave behind ends as our child
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        if not said:
            return Serving(error="it ended while it started", has_ended=True)
        return Serving(socket=path, error=json.loads(said).get("error"))
