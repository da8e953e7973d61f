"""GroupNorm and InstanceNorm (+ activation), NHWC."""
