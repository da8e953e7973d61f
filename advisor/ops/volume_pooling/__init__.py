"""Max and average pooling of volumes, NDHWC: `api` is the only public module."""
