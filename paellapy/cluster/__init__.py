"""Many GPUs: routers in front of engines, placement, and engines on Ray Serve."""
