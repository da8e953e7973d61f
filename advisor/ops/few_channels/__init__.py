"""Convolutions of a few input channels, computed with eight, of which the others are zeros."""
