"""Training loops of CuPy alone: their steps, what they do, and what makes them faster. Nothing here needs torch."""
