"""Weights that SGLang holds are compared by checksum, where both sides compute the same one."""

import asyncio
import hashlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tests.labelled_device import CUDA, labelled_device
from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.errors import RankError

Weights = dict[str, torch.Tensor]
FIRST, SECOND = (
    {"model.norm.weight": torch.full((8,), value), "model.other.weight": torch.full((4,), value)}
    for value in (1.0, 2.0)
)


def on_host(tensor: torch.Tensor) -> int:
    digest = hashlib.sha256(tensor.cpu().contiguous().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big")


def by_device(tensor: torch.Tensor) -> int:
    """Hash as SGLang does: another function on a GPU."""
    return on_host(tensor) ^ (1 if tensor.is_cuda else 0)


def foreign(tensor: torch.Tensor) -> int:
    return on_host(tensor) ^ 2


class Scheduler:
    """Stands for SGLang's scheduler, and for the client that leads to it."""

    def __init__(self, checksum: Callable[[torch.Tensor], int], device: str) -> None:
        self.held = dict(FIRST)
        self.loses: set[str] = set()
        self.spoils = False
        self.killed = False
        self.server_args = SimpleNamespace(device=device, base_gpu_id=0)
        self.loop = asyncio.new_event_loop()
        self._checksum = checksum

    @property
    def engine(self) -> "Scheduler":
        return self

    tokenizer_manager = engine
    schedulers = (1,)

    async def update_weights_from_tensor(self, weights: Weights, _: None) -> tuple[bool, str]:
        arrived = {name: t for name, t in weights.items() if name not in self.loses}
        self.held |= {name: 1.5 * t if self.spoils else t for name, t in arrived.items()}
        return True, ""

    async def check_weights(self, *_: Any) -> tuple[bool, str, list[dict[str, Any]], None]:
        device = CUDA if self.server_args.device == "cuda" else torch.device("cpu")
        held = {name: f"{self._checksum(t.to(device)):016x}" for name, t in self.held.items()}
        return True, "", [{"checksums": held}], None

    def __getattr__(self, name: str) -> Any:
        async def do_nothing(*_: Any) -> None: ...

        return do_nothing

    def kill(self) -> None:
        self.killed = True

    def failure(self) -> None:
        return None


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's modules: requests are not looked at, and weights aren't serialised."""
    requests = {
        "UpdateWeightsFromTensorReqInput": lambda serialized_named_tensors, **_: dict(
            serialized_named_tensors[0]
        )
    }
    for name in ("BeginWeightUpdate", "EndWeightUpdate", "CheckWeights"):
        requests[f"{name}ReqInput"] = SimpleNamespace
    for name in ("PauseGeneration", "ContinueGeneration"):
        requests[f"{name}ReqInput"] = SimpleNamespace
    parts: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": requests,
        "sglang.srt.managers.mm_utils": {"tensor_hash": by_device},
        "sglang.srt.utils": {
            "MultiprocessingSerializer": SimpleNamespace(serialize=lambda tensors: tensors)
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def scheduler(request: pytest.FixtureRequest) -> Iterator[Scheduler]:
    made = Scheduler(*getattr(request, "param", (by_device, "cpu")))
    yield made
    made.loop.close()


def update(scheduler: Scheduler, weights: Weights, client: SglangClient | None = None) -> None:
    client = client or client_of(scheduler)
    client.run(client.update_policy(weights, PolicyVersion(1)))


def client_of(scheduler: Scheduler) -> SglangClient:
    return SglangClient(scheduler, torch.float32, (), 5.0)  # type: ignore[arg-type]


def test_accepts_what_was_sent(scheduler: Scheduler) -> None:
    update(scheduler, SECOND)
    assert not scheduler.killed


@pytest.mark.parametrize("lost", [{"model.other.weight"}, set(FIRST)])
def test_finds_weights_that_did_not_arrive(scheduler: Scheduler, lost: set[str]) -> None:
    scheduler.loses = lost
    with pytest.raises(RankError, match=r"holds another model\.\w+\.weight"):
        update(scheduler, SECOND)
    assert scheduler.killed


@pytest.mark.parametrize("scheduler", [(by_device, "cuda")], indirect=True)
def test_weights_from_a_file_are_hashed_where_sglang_hashes_its_own(scheduler: Scheduler) -> None:
    """A late rank reads them from a blob, so that they are on the host."""
    with labelled_device():
        update(scheduler, SECOND)
        scheduler.loses = set(FIRST)
        with pytest.raises(RankError, match="holds another"):
            update(scheduler, FIRST)


@pytest.mark.parametrize("scheduler", [(by_device, "cuda")], indirect=True)
def test_weights_go_to_the_device_once_to_be_sent_and_hashed(scheduler: Scheduler) -> None:
    with labelled_device() as device:
        update(scheduler, SECOND)
        device.syncs.clear()
        update(scheduler, FIRST)
        assert device.count("upload") == len(FIRST)


@pytest.mark.parametrize("scheduler", [(foreign, "cpu")], indirect=True)
def test_another_checksum_than_ours_is_no_reason_to_stop(scheduler: Scheduler) -> None:
    client = client_of(scheduler)
    with capture_logs() as logs:
        for weights in (SECOND, FIRST, FIRST):
            update(scheduler, weights, client)
    assert not scheduler.killed
    assert [entry["event"] for entry in logs] == ["SGLang's weights cannot be verified"]


def test_all_weights_may_be_wrong_once_the_checksums_are_known(scheduler: Scheduler) -> None:
    client = client_of(scheduler)
    update(scheduler, SECOND, client)
    scheduler.spoils = True
    with pytest.raises(RankError, match="holds another"):
        update(scheduler, FIRST, client)
    assert scheduler.killed
