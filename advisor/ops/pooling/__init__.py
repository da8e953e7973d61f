"""Max, average and global average pooling, NHWC, forward and backward: `api` is the only public module."""
