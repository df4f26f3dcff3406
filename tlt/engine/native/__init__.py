"""The engine that needs nothing but torch."""

from tlt.engine.native.engine import NativeEngine

__all__ = ["NativeEngine"]
