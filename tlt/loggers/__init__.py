"""Send a job's figures and spans to loggers such as W&B, in a process of its own."""
