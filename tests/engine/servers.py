"""Share SGLang servers, which take seconds to start, between the tests of one model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tlt.base.id_types import PolicyVersion
from tlt.engine.sglang.client.engine import SglangEngine
from tlt.engine.sglang.client.sglang_client import SglangClient
from tlt.engine.sglang.client.start_engine_with_tap import start_client
from tlt.engine.sglang.shared.shared_hidden_state_buffer import Tap
from tlt.models.decoder_from_folder import load_decoder
from tlt.models.decoder_spec import DecoderConfig

_SLOTS, _CONTEXT = 32, 2048
# servers that may run at the same time
_MOST = 3


class Servers:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[tuple[Path, torch.dtype], tuple[SglangClient, Tap]] = {}

    def engine(
        self,
        model: Path,
        slots: int,
        max_context: int,
        dtype: torch.dtype,
        decode_text: Callable[[Sequence[int]], str],
    ) -> SglangEngine:
        """Return an engine on a shared server, with its weights reset to those of the folder."""
        dtype = torch.float32 if dtype == torch.float64 else dtype
        policy = load_decoder(model, dtype)
        server, tap = self._started.get((model, dtype)) or self._start(model, dtype, policy.config)
        version = PolicyVersion(0)
        engine = SglangEngine(server, model, tap, decode_text, slots, max_context, version)
        engine.swap_weights(version, policy.weights)
        return engine

    def close(self) -> None:
        for server, _ in self._started.values():
            server.close()

    def _start(
        self, model: Path, dtype: torch.dtype, config: DecoderConfig
    ) -> tuple[SglangClient, Tap]:
        if len(self._started) == _MOST:
            oldest, _ = self._started.pop(next(iter(self._started)))
            oldest.close()
        self._started[model, dtype] = started = start_client(
            model,
            slots=_SLOTS,
            max_context=min(_CONTEXT, config.max_positions),
            device=torch.device("cpu"),
            dtype=dtype,
            version=PolicyVersion(0),
            folder=self._folder,
            stuck_seconds=60,
            captured=range(1, config.layers + 1),
        )
        return started
