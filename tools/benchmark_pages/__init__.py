"""Makes docs/benchmarks of the results on file. For this repository alone: no part of the package that users install."""
