"""Kernels that report, the traces they leave, and the devices that run them."""

# Under a second name every module would exist twice, with other classes and other state.
if __name__ != "paellapy.instrument":
    raise ImportError(f"{__name__!r} is a folder of paellapy's repository: import paellapy.instrument")
