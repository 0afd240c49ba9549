"""The fast path of an inference: from a connection's bytes into a slot and back, without the web framework."""
