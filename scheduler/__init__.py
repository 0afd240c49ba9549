"""The dispatcher: programs, instances, segments and policies."""

# Under a second name every module would exist twice, with other classes and other state.
if __name__ != "paellapy.scheduler":
    raise ImportError(f"{__name__!r} is a folder of paellapy's repository: import paellapy.scheduler")
