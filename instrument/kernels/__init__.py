"""Kernels: written in Triton or CUDA C, compiled, launched, preempted; and those that PyTorch launches itself."""
