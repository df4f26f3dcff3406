"""A redis-server with TLS and a password."""

import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.conftest import free_port


class TlsRedis:
    def __init__(
        self, folder: Path, password: str, *, name: str = "IP:127.0.0.1", clients: bool = False
    ) -> None:
        """Start it with a certificate for `name`; with `clients`, it asks for one of theirs.

        It trusts its own certificate alone, so that is the one that clients have to show.
        """
        binary = shutil.which("redis-server")
        assert binary is not None
        self.password, self.port = password, free_port()
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        certify(self.certificate, self.key, name)
        configuration = folder / "redis.conf"
        configuration.touch(mode=0o600)
        configuration.write_text(
            f"port 0\ntls-port {self.port}\nbind 127.0.0.1\nrequirepass {password}\n"
            f"tls-cert-file {self.certificate}\ntls-key-file {self.key}\n"
            f"tls-ca-cert-file {self.certificate}\n"
            f'tls-auth-clients {"yes" if clients else "no"}\nsave ""\n'
        )
        self._process = subprocess.Popen(
            [binary, str(configuration)], stdout=subprocess.PIPE, text=True, cwd=folder
        )
        assert self._process.stdout is not None
        assert any("Ready to accept connections" in line for line in self._process.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType
    ) -> None:
        self._process.terminate()
        self._process.communicate()

    def url(self, password: str | None = None, scheme: str = "rediss", **options: object) -> str:
        query = "&".join(f"{name}={value}" for name, value in options.items())
        given = self.password if password is None else password
        return f"{scheme}://:{given}@127.0.0.1:{self.port}/0?{query}"

    @property
    def trusted_url(self) -> str:
        return self.url(ssl_ca_certs=self.certificate)


def certify(certificate: Path, key: Path, name: str = "IP:127.0.0.1") -> None:
    """Write a certificate for `name` that is its own authority, and its key."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    subprocess.run(
        [
            *command.split(),
            *("-subj", "/CN=tlt", "-addext", f"subjectAltName={name}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
