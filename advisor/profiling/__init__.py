"""Measure a script: `inside` its process, `beside` it, and `after` it; `machine` and `trace` serve all three."""
