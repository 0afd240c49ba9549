"""Traces: the records of blocks read from the rings, put on one time line, summed up and kept in files."""
