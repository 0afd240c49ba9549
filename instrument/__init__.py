"""Kernels that report, the traces they leave, and the devices that run them."""

# Imported under a second name, every module would exist twice, with different classes and state.
if __name__ != "paellapy.instrument":
    raise ImportError(
        f"{__name__!r} is a folder of paellapy's repository, not a package: import paellapy.instrument instead"
    )
