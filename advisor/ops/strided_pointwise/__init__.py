"""1 x 1 convolution of stride 2 between few channels, NHWC. `api` is the only public module."""
