"""Simulated time: workloads, models of the GPU that serves them, and results."""
