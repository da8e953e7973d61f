"""What the records of a trace mean: kinds, shapes, intervals, the host's calls."""
