"""A CuPy step recorded once and replayed: its calls are compared with the recorded ones and answered with arrays that a CUDA graph fills."""
