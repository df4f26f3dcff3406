"""Build C kernels for CPUs; `lanes.h` has vectors as wide as the machine's registers."""
