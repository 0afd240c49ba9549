"""The HTTP front end: Open Inference Protocol v2 over one engine, with latency targets."""
