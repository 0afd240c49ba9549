"""The GPUs behind an engine: a real one and a virtual one, with one interface."""
