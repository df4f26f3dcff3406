"""SGLang on a CPU: what its GPU packages would do, in torch, for dense models and draft chains.

Nothing in here is reachable unless `mode.enter` was called, which refuses where a GPU build exists.
"""
