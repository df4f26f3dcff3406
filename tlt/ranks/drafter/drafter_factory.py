"""Build drafters of the shape that a job trains."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tlt.base.id_types import Digest
from tlt.base.interrupt_check import CheckInterrupt, never_interrupt
from tlt.engine.base import Engine
from tlt.errors import BlobError
from tlt.models.drafter_folder import read_update_count
from tlt.models.eagle_drafter import Drafter, architecture, new_drafter
from tlt.models.float32_product import wide
from tlt.ranks.engine_factory import drafter_config
from tlt.spec.config import JobSpec
from tlt.trainer.drafter.drafter_learner import DrafterLearner
from tlt.trainer.drafter.hyperparameters import DrafterHyperparameters
from tlt.trainer.drafter.initial_drafter import (
    choose_tokens,
    initialise_drafter,
    measure_input_sizes,
)
from tlt.trainer.drafter.samples import DrafterSample, EmbeddingAndHead

# assumed update count of a named drafter whose folder doesn't record one
_TRAINED_UPDATES = 3000


class DrafterFactory:
    """The drafter's shape, and the weights that it shares with the policy or the named drafter."""

    def __init__(self, spec: JobSpec, engine: Engine, named: Drafter | None) -> None:
        """Take the shape from `named`, the drafter that the spec names, if it names one."""
        embedding, head = engine.embedding_and_head
        self.named = named
        self.shared = EmbeddingAndHead(embedding=embedding, head=head)
        self._spec = spec
        self._config = drafter_config(spec, named)

    @property
    def device(self) -> torch.device:
        """Return the device of drafters."""
        return self.shared.head.device

    @property
    def architecture(self) -> Digest:
        """Return the digest of the shape."""
        return architecture(self._config)

    @property
    def base_bytes(self) -> int:
        """Return the size of weights and mean in the format of training; a delta has half of it."""
        with torch.device("meta"):
            parameters = list(new_drafter(self._config).parameters())
        return 2 * sum(p.numel() for p in parameters) * wide(self.shared.head.dtype).itemsize

    def build(self, tensors: Mapping[str, Tensor]) -> Drafter:
        """Return a drafter of these weights in the engine's format.

        Untrained ones come from the named drafter.
        """
        drafter = new_drafter(self._config)
        if self.named is not None:
            drafter.load_state_dict(self.named.state_dict())
        held = drafter.state_dict()
        if self.named is not None and "d2t" in held:
            tensors = {"d2t": held["d2t"], **tensors}
        if {name: t.shape for name, t in tensors.items()} != {n: t.shape for n, t in held.items()}:
            raise BlobError("a drafter of other names or shapes than this job's")
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise BlobError("a drafter with numbers that are not finite")
        drafter.load_state_dict(tensors)
        return drafter.to(self.shared.head).requires_grad_(False)

    def new_learner(
        self, samples: Sequence[DrafterSample], check: CheckInterrupt = never_interrupt
    ) -> DrafterLearner:
        """Return a learner of the named drafter, or a new one that suits these samples."""
        sizes = measure_input_sizes(self._config, self.shared.embedding, samples)
        if self.named is None:
            drafter, updates = initialise_drafter(self._config, sizes, self._spec.seed), 0
            choose_tokens(drafter, self.shared.head, samples, check)
        else:
            drafter, updates = new_drafter(self._config), self._updates_of_named()
            drafter.load_state_dict(self.named.state_dict())
        # in float32 at least, because a half format loses small steps
        drafter = drafter.to(self.device, wide(self.shared.head.dtype)).requires_grad_(True)
        hyperparameters = DrafterHyperparameters(past=updates)
        return DrafterLearner(drafter, self.shared, hyperparameters, sizes)

    def _updates_of_named(self) -> int:
        assert self._spec.drafter.path is not None
        known = read_update_count(Path(self._spec.drafter.path))
        return _TRAINED_UPDATES if known is None else min(known, _TRAINED_UPDATES)
