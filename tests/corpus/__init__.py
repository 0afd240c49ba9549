"""Kernels the tests run everywhere: in Triton and in CUDA C, each with inputs and a NumPy reference."""
