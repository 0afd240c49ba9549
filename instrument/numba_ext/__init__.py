"""Numba for the hot path: compiled as a whole, linked part by part, cached by the code itself."""
