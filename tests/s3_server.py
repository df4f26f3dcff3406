"""An S3 server in a process of its own, which can be stopped and started with its objects.

Run as `python -m tests.s3_server PORT`; it follows the lines of its standard input.
"""

import contextlib
import math
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator
from typing import Any

BUCKET = "bucket"


class S3Server:
    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"
        # what programs of a user of this server have in their environment
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": secrets.token_hex(10),
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
            "AWS_DEFAULT_REGION": "us-east-1",
            # give up after a second instead of ten
            "AWS_MAX_ATTEMPTS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.s3_server", str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.tell("start")
        self.client("s3").create_bucket(Bucket=BUCKET)

    def tell(self, line: str) -> None:
        """Have it `start` or `stop`, or ask for permissions (`guard`) or not (`unguard`)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == f"{line}\n"

    @contextlib.contextmanager
    def frozen(self) -> Generator[None]:
        """Have it take connections, and say nothing."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self, service: str) -> Any:
        import boto3

        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
        )

    def objects(self) -> list[str]:
        listed = self.client("s3").list_objects_v2(Bucket=BUCKET)
        return [each["Key"] for each in listed.get("Contents", [])]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from moto import settings
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer()
    for line in sys.stdin:
        match line.strip():
            case "start":
                server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
                server.start()
            case "stop":
                server.stop()
            case guarding:
                settings.INITIAL_NO_AUTH_ACTION_COUNT = 0 if guarding == "guard" else math.inf
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
