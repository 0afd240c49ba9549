"""Simulated time: workloads, the models of a GPU that serve them, and the results."""
