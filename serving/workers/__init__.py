"""`--workers N`: a supervisor, a process with the engine, and processes that speak HTTP."""
