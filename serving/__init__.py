"""The HTTP front end: Open Inference Protocol v2 over one engine, with latency targets."""

# Imported under a second name, every module would exist twice, with separate classes and state.
if __name__ != "paellapy.serving":
    raise ImportError(f"{__name__!r} is a folder of paellapy's repository: write `import paellapy.serving` instead")
