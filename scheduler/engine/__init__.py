"""The engine: models on one GPU, with their loading, requests, front ends, statistics, traces and monitoring."""
