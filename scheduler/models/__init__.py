"""Models: their description, capture, program in segments, measured times and memory."""
