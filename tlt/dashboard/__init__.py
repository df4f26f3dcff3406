"""The live web page: it reads journals and Redis, and writes only what users ask of jobs."""
