"""What can be run: a model's description, its capture, its program in segments, its measured times, its memory."""
