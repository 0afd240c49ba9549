"""`--workers N`: a supervisor, the engine's own process, and processes that speak HTTP."""
