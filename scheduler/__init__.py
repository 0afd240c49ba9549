"""The dispatcher: programs, lanes, segments and policies."""
