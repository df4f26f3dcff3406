"""The live page: it reads journals and Redis, and writes nothing but submit and cancel."""
