"""Builds small traces by hand, in microseconds, with every column filled as the collector fills it."""

from __future__ import annotations

from advisor.core.trace import DeviceTable, DramSamples, OpTable, RuntimeTable, Trace
from advisor.profiling.trace.hostcalls import is_launch

US = 1000
BASE = 1_700_000_000_000_000_000  # a Kineto clock value: 2023, ns


class Builder:
    """Each method adds one event and returns its correlation id."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = device
        self.ops, self.runtime, self.kernels = OpTable(), RuntimeTable(), DeviceTable()
        self.dram = DramSamples()
        self.bounds: list[int] = []
        self._next = 0

    def _id(self) -> int:
        self._next += 1
        return self._next

    def op(
        self, name: str, start: float, end: float, *, thread: int = 1, sequence: int = -1, forward_thread: int = 0,
        annotation: str = "", shapes: str = "", dtypes: str = "", strides: str = "", arguments: str = "",
    ) -> int:  # fmt: skip
        identity, ops = self._id(), self.ops
        ops.name.append(name)
        ops.start_ns.append(BASE + int(start * US))
        ops.end_ns.append(BASE + int(end * US))
        ops.thread.append(thread)
        ops.correlation.append(identity)
        ops.sequence.append(sequence)
        ops.forward_thread.append(forward_thread)
        ops.annotation.append(annotation)
        ops.shapes.append(shapes)
        ops.dtypes.append(dtypes)
        ops.strides.append(strides)
        ops.arguments.append(arguments)
        ops.flops.append(0)
        return identity

    def note(self, annotation: str, start: float, end: float, *, thread: int = 1) -> int:
        return self.op(f"advisor:{annotation}", start, end, thread=thread, annotation=annotation)

    def call(self, name: str, start: float, end: float, *, thread: int = 1) -> int:
        identity = self._id()
        self.runtime.name.append(name)
        self.runtime.start_ns.append(BASE + int(start * US))
        self.runtime.end_ns.append(BASE + int(end * US))
        self.runtime.thread.append(thread)
        self.runtime.correlation.append(identity)
        return identity

    def record(
        self, name: str, start: float, end: float, *, call: int = 0, op: int = 0, stream: int = 7, grid: str = "",
        block: str = "", nbytes: int = 0, device: int = 0,
    ) -> None:  # fmt: skip
        kernels = self.kernels
        kernels.name.append(name)
        kernels.start_ns.append(BASE + int(start * US))
        kernels.end_ns.append(BASE + int(end * US))
        kernels.stream.append(stream)
        kernels.correlation.append(call)
        kernels.op.append(op)
        kernels.grid.append(grid)
        kernels.block.append(block)
        kernels.nbytes.append(nbytes)
        kernels.device.append(device)

    def launch(
        self, kernel: str, at: float, start: float, end: float, *, thread: int = 1, stream: int = 7, device: int = 0
    ) -> int:
        """A launch call of 2 µs at `at`, and the kernel it starts."""
        call = self.call("cudaLaunchKernel", at, at + 2, thread=thread)
        self.record(kernel, start, end, call=call, stream=stream, device=device)
        return call

    def sample(self, start: float, end: float, read: float, written: float) -> None:
        self.dram.start_ns.append(BASE + int(start * US))
        self.dram.end_ns.append(BASE + int(end * US))
        self.dram.read_bytes.append(read)
        self.dram.write_bytes.append(written)

    def steps(self, *bounds: float) -> None:
        self.bounds = [BASE + int(b * US) for b in bounds]

    def trace(self) -> Trace:
        seen = set(self.kernels.correlation)
        launched = [c for n, c in zip(self.runtime.name, self.runtime.correlation, strict=True) if is_launch(n)]
        return Trace(
            device=self.device, step_bounds_ns=self.bounds, ops=self.ops, runtime=self.runtime, kernels=self.kernels,
            dram=self.dram, launches=len(launched), launches_matched=sum(c in seen for c in launched),
        )  # fmt: skip


def resnet_like(events: int, steps: int = 3) -> Builder:
    """About `events` events: per layer a module, a source line, nested operators, a launch and a kernel, and the backward."""
    builder = Builder()
    per_layer = 16
    layers = max(events // per_layer // steps, 1)
    now, device_free, bounds = 0.0, 0.0, [0.0]
    shape, types = "[[32, 64, 56, 56], [64, 64, 3, 3], [], [], [], [], [], [], []]", "float,float,,,,,,,"
    arguments = "[null, null, null, [1, 1], [1, 1], [1, 1], false, [0, 0], 1]"
    for step in range(steps):
        for layer in range(layers):
            path = f"ResNet.layer{layer % 60}.conv"
            sequence = step * layers + layer
            builder.note(f"module:{path}|Conv2d", now, now + 40)
            builder.note(f"line:models/resnet.py:{layer % 60}", now + 1, now + 39)
            builder.op("aten::conv2d", now + 2, now + 38, sequence=sequence, shapes=shape, dtypes=types)
            builder.op(
                "aten::convolution", now + 3, now + 37, sequence=sequence, shapes=shape, dtypes=types,
                arguments=arguments,
            )  # fmt: skip
            builder.op("aten::_convolution", now + 4, now + 36, shapes=shape, dtypes=types)
            builder.op("aten::cudnn_convolution", now + 5, now + 35, shapes=shape, dtypes=types)
            builder.op("aten::empty", now + 6, now + 7)
            device_free = max(device_free, now + 12)
            builder.launch("sm90_xmma_fprop_implicit_gemm_tf32f32", now + 8, device_free, device_free + 30)
            device_free += 31
            now += 41
        for layer in reversed(range(layers)):
            sequence = step * layers + layer
            name = "ConvolutionBackward0"
            builder.op(f"autograd::engine::evaluate_function: {name}", now, now + 30, thread=2, sequence=sequence,
                       forward_thread=1)  # fmt: skip
            builder.op(name, now + 1, now + 29, thread=2, sequence=sequence, forward_thread=1)
            builder.op("aten::convolution_backward", now + 2, now + 28, thread=2)
            for offset in (4, 12):
                device_free = max(device_free, now + offset + 5)
                builder.launch("sm90_xmma_dgrad_implicit_gemm_tf32f32", now + offset, device_free, device_free + 30,
                               thread=2)  # fmt: skip
                device_free += 31
            now += 31
        bounds.append(now)
    builder.steps(*bounds)
    return builder
