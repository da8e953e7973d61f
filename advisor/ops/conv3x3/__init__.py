"""3 x 3 convolution of stride 1 between few channels, NHWC, on Hopper's tensor cores. `api` is the only public module."""
