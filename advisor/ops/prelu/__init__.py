"""LeakyReLU whose slope is a parameter a channel, NHWC."""
