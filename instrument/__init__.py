"""The compiler passes, records and devices beneath paellapy."""

# Under a second name every module would exist twice, with other classes and other state.
if __name__ != "paellapy.instrument":
    raise ImportError(f"{__name__!r} is a folder of paellapy's repository: import paellapy.instrument")
