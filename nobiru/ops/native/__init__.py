"""Kernels in C for CPUs, an optional fast path: everything works without a compiler, only slower."""
