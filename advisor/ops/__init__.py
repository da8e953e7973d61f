"""The Python half of `kernels/`: one folder an operation, each with api, reference, cuda and spec."""
