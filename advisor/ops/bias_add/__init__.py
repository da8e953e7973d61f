"""Bias (+ residual add) of a convolution, where no activation follows, and the bias's gradient, NHWC."""
