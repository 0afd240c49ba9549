"""The HTTP front end: Open Inference Protocol v2 over one engine, with latency targets."""

# Under a second name every module would exist twice, with other classes and other state.
if __name__ != "paellapy.serving":
    raise ImportError(f"{__name__!r} is a folder of paellapy's repository: import paellapy.serving")
