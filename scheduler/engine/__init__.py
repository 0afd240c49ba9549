"""Models on one GPU: loading, requests, front ends of other processes, counts, traces, the look at it all."""
