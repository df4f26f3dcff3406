"""Invariant: everything below is an example; nothing in the product imports it."""
