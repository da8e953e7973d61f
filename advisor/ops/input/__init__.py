"""Uint8 batches made fp32 on the GPU, normalised as the data set would have done it."""
