"""The live web page: it reads journals and Redis, and writes only submissions and cancellations."""
