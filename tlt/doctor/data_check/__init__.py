"""Look at a job's data before it trains: lengths, repeats, leakage, and rewards of the gold."""
