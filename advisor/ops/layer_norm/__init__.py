"""LayerNorm over the channels of each pixel, NHWC, without permutes."""
