"""Casts of many tensors in one launch: a training's weights to half precision, and their gradients back."""
