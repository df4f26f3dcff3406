"""SGLang on a CPU: its GPU kernels in torch, for dense models and draft chains.

SGLang can import nothing here before `cpu_mode.enter`, which refuses where a GPU build exists.
"""
