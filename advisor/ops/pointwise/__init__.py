"""1 x 1 convolution, NHWC, on tensor cores, that leaves the moments of its result for the batch norm behind it. `api` is the only
public module."""
