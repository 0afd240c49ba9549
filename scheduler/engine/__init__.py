"""The engine: models on one GPU, with their loading, requests, producers, statistics, traces and monitoring."""
