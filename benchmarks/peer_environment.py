"""Make build/peers: TRL and verl, beside torch and the other packages of this environment."""

import subprocess
import sysconfig
import venv
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_FOLDER = _ROOT / "build" / "peers"
_LOCK = _ROOT / "requirements" / "peers.lock"


def run_with_peers(module: str, *arguments: str) -> None:
    """Run a module of this repository where TRL and verl are installed."""
    python = _FOLDER / "bin" / "python"
    installed = _FOLDER / "installed.lock"
    pins = _LOCK.read_text()
    if not installed.exists() or installed.read_text() != pins:
        venv.create(_FOLDER, clear=True, with_pip=True)
        _share_packages(python)
        install = ["-m", "pip", "install", "--quiet", "--no-deps", "-r", str(_LOCK)]
        subprocess.run([python, *install], check=True)
        installed.write_text(pins)
    subprocess.run([python, "-m", module, *arguments], cwd=_ROOT, check=True)


def _share_packages(python: Path) -> None:
    """Let the new environment import this one's packages: the same torch computes both sides."""
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    found = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    Path(found, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
