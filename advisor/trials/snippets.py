"""What each change is in a training's own source, as lines to copy from; changes without such lines are advisor's to apply. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
SNIPPETS: dict[str, Callable[[Mapping[str, str]], list[str]]] = {
    "tf32": lambda p: ["torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cudnn.allow_tf32 = True"],
    "cudnn_benchmark": lambda p: ["torch.backends.cudnn.benchmark = True"],
    "fused_optimizer": lambda p: [
        f"# where the optimizer is made, {' or '.join(FUSED)}: give it the argument fused=True"
    ],
    "set_to_none": lambda p: ["optimizer.zero_grad()  # without set_to_none=False"],
    "loader_workers": lambda p: [
        f"loader = torch.utils.data.DataLoader(data, num_workers={p.get('workers', '4')})",
        "# on a CPU too: torch.set_num_threads(the cores that the workers leave)",
    ],
    "prefetch": lambda p: ["images = images.to(device, non_blocking=True)  # from a DataLoader with pin_memory=True"],
    "channels_last": lambda p: [
        "model = model.to(memory_format=torch.channels_last)",
        "images = images.to(memory_format=torch.channels_last)",
    ],
    "amp_bf16": lambda p: [
        "with torch.autocast(images.device.type, dtype=torch.bfloat16):",
        "    loss = criterion(model(images), labels)",
    ],
    "compile": lambda p: ["model.compile()"],
    "defer_sync": lambda p: ["total += loss.detach()  # and .item() once an epoch"],
    "cupy_tf32": lambda p: ["# in the environment: CUPY_TF32=1"],
    "cupy_cub": lambda p: ["# in the environment: CUPY_ACCELERATORS=cub"],
    "cupy_single": lambda p: [
        "x = cupy.asarray(a, dtype=cupy.float32)  # and dtype=cupy.float32 in cupy.zeros, cupy.random.randn …"
    ],
    "cupy_border": lambda p: [
        "tensor = torch.from_dlpack(array).clone()",
        "array = cupy.from_dlpack(tensor.detach()).copy()",
    ],
}
