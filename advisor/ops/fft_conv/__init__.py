"""Dense convolution with 11 and more taps a side by Fourier transforms of whole images. `api` is the only public module."""
