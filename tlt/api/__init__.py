"""Start sessions, submit jobs and read their results from Python: what `import tlt` offers."""
