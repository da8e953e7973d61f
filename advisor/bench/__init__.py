"""Benchmarks that write docs/benchmarks: bundled kernels (`ops`) and whole trainings (`models`)."""
