"""Accept TLT on a machine with a GPU and without a network, in some minutes."""
