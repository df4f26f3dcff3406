"""C for CPUs: how it is built, and vectors as wide as the machine's registers."""
