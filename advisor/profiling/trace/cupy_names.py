"""CuPy's operations under the names that the models of cost and the kinds of work know: those of PyTorch's operators."""

from __future__ import annotations

PREFIX = "cupy::"
MADE = ".made"  # behind a kernel class's name: an object of it is made

_SAME = {
    "add": "__add__ __radd__ add",
    "add_": "__iadd__",
    "sub": "__sub__ __rsub__ subtract",
    "sub_": "__isub__",
    "mul": "__mul__ __rmul__ multiply",
    "mul_": "__imul__",
    "div": "__truediv__ __rtruediv__ divide true_divide",
    "div_": "__itruediv__",
    "pow": "__pow__ __rpow__ __ipow__ power square",
    "neg": "__neg__ negative",
    "abs": "__abs__ absolute",
    "lt": "__lt__ less",
    "le": "__le__ less_equal",
    "gt": "__gt__ greater",
    "ge": "__ge__ greater_equal",
    "eq": "__eq__ equal",
    "ne": "__ne__ not_equal",
    "bitwise_and": "__and__ __rand__ __iand__",
    "bitwise_or": "__or__ __ror__ __ior__",
    "bitwise_not": "__invert__",
    "floor_divide": "__floordiv__ __rfloordiv__",
    "remainder": "__mod__ __rmod__",
    "clamp": "clip",
    "where": "where",
    "mm": "dot matmul __matmul__ __rmatmul__ tensordot inner vdot outer einsum",
    "index": "__getitem__ take choose compress",
    "index_put_": "__setitem__ put",
    "scatter_add": "scatter_add add.at cupyx.scatter_add scatter_max scatter_min",
    "_to_copy": "astype",
    "clone": "copy __copy__ ascontiguousarray asfortranarray flatten",
    "reshape": "reshape ravel",
    "permute": "transpose rollaxis moveaxis swapaxes",
    "expand": "broadcast_to",
    "squeeze": "squeeze expand_dims",
    "constant_pad_nd": "pad",
    "cat": "concatenate stack hstack vstack dstack column_stack",
    "im2col": "ElementwiseKernel:im2col",
    "col2im": "ElementwiseKernel:col2im",
    "_local_scalar_dense": "get item __float__ __int__ __bool__ tolist asnumpy",
    "copy_": "array asarray set asanyarray copyto",
    "zeros": "zeros zeros_like",
    "ones": "ones ones_like",
    "full": "full full_like fill",
    "empty": "empty empty_like",
    "randn": "random.randn random.normal random.standard_normal",
    "rand": "random.rand random.uniform random.random random.random_sample random.randint",
}
_TORCH = {cupy: torch for torch, names in _SAME.items() for cupy in names.split()}

DTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "int64": "long int",
    "int32": "int",
    "int16": "short int",
    "int8": "signed char",
    "uint8": "unsigned char",
    "bool": "bool",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}


def torch_name(name: str) -> str:
    """The operator of PyTorch's that does what `cupy::<name>` does; `name` itself where it is none of CuPy's."""
    if not name.startswith(PREFIX):
        return name
    own = name[len(PREFIX) :]
    return "aten::" + _TORCH.get(own, own)
