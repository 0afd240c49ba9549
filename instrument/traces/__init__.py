"""Traces: block records read from the rings, placed on one time line, summarized, and stored in files."""
