"""Swap the drafter that the engine proposes with."""

from tlt.base.id_types import NAMED
from tlt.blobs.blob_files import Blobs
from tlt.engine.base import Engine
from tlt.errors import BlobError, ConfigError
from tlt.models.eagle_drafter import Drafter
from tlt.models.safetensors_io import read_weights
from tlt.protocol.refs import DrafterRef
from tlt.ranks.drafter.drafter_factory import DrafterFactory


class DrafterInUse:
    """The drafter that the engine proposes with now."""

    def __init__(self, engine: Engine, factory: DrafterFactory, blobs: Blobs) -> None:
        self.drafter: Drafter | None = factory.named
        self._engine = engine
        self._factory = factory
        self._blobs = blobs

    def adopt(self, ref: DrafterRef | None) -> str | None:
        """Use this version (None: the named drafter, or none); return the reason if that fails."""
        if ref is None:
            self._restore_named()
            return None
        if ref.version == self._engine.drafter_version:
            return None
        name = f"drafter version {ref.version}"
        if ref.architecture != self._factory.architecture:
            return f"{name} was made for another architecture"
        try:
            drafter = self._factory.build(read_weights(self._blobs, ref.weights))
            self._engine.adopt_drafter(ref.version, drafter)
        except (BlobError, ConfigError) as error:
            return f"{name}: {error}"
        self.drafter = drafter
        return None

    def _restore_named(self) -> None:
        named = self._factory.named
        if named is not None:
            self._engine.adopt_drafter(NAMED, named)
        elif self._engine.drafter_version is not None:
            self._engine.drop_drafter()
        self.drafter = named
