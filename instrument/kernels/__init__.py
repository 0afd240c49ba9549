"""Kernels: written in Triton or CUDA C, compiled, launched, preempted; and kernels that PyTorch launches itself."""
