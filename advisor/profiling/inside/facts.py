"""Plain facts read from live objects: the model, its optimizer, its flags, its input pipeline. Changes nothing."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from advisor.core.profile import ConvFact, LayoutBreak, ModelFacts, Site
from advisor.loop import layouts, ranks
from advisor.loop.compiles import compiled_code_in_use, graph_breaks, is_compiled
from advisor.loop.discover import Discovery
from advisor.loop.observed import Observations, subtracts_means
from advisor.loop.steps import StepWatcher
from advisor.loop.training import Training
from advisor.loop.values import inner
from advisor.profiling.inside import settings, untrained
from advisor.profiling.inside.annotate import module_names
from advisor.profiling.inside.dtypes import dtype_name

# Writes to a gradient: two a step where it is zeroed in place and added to, some dozens by the time a profile is made. One that was
# made in this step has one for each further backward pass, and one for clipping.
WRITTEN_BEFORE = 32

# Variables that change how fast a training runs; shown when set.
ENVIRONMENT = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDNN_CONV_WSCAP_DBG",
    "CUDNN_LOGLEVEL_DBG",
    "KMP_AFFINITY",
    "MALLOC_CONF",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CUDNN_V8_API_DISABLED",
    "TORCH_LOGS",
)


def model_facts(
    training: Training,
    discovery: Discovery | None = None,
    watcher: StepWatcher | None = None,
    recompiles: int | None = None,
    compilations: tuple[Site, ...] = (),
) -> ModelFacts:
    """What is trained and how. Without `discovery` and `watcher` what only they have seen keeps its default.

    `recompiles` and `compilations` are counted by the caller: graphs that Dynamo has compiled since the warm-up, and of what.
    """
    seen = discovery.seen if discovery is not None else Observations()
    modules = [root.module for root in training.roots]
    parameters = list({id(p): p for module in modules for p in module.parameters()}.values())
    if not parameters:
        parameters = [p for o in training.optimizers for group in o.param_groups for p in group["params"]]
    everything = list({id(m): m for module in modules for m in module.modules()}.values())
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[dtype_name(parameter.dtype)] += parameter.numel()
    convs = tuple(_convs(training, seen))
    backwards = (watcher.usual.backwards if watcher is not None else 0) or 1
    called_once = len(training.optimizers) <= 1 and not (watcher is not None and watcher.usual.closure_steps)
    return ModelFacts(
        **_of_updates(training, seen),
        **_of_processes(training.device, everything),
        roots=tuple(type(inner(module)).__name__ for module in modules),
        guides=tuple(guide.name for guide in training.guides),
        untrained=untrained.modules(training),
        parameters=sum(p.numel() for p in parameters),
        module_counts=dict(Counter(type(m).__name__ for m in everything)),
        convs=convs,
        parameter_dtype=sizes.most_common(1)[0][0] if sizes else "fp32",
        channels_last=_mostly_channels_last(convs, everything),
        weights_channels_last=_weights_channels_last(everything),
        layout_breaks=_layout_breaks(training, seen),
        fixed_shapes=training.fixed_shapes,
        batch_size=training.batch_size,
        accumulation=backwards if called_once and _batches_drawn(watcher) != 1 else 1,
        backwards=backwards,
        grad_clipping=seen.clipping,
        compiled=any(map(is_compiled, everything))
        # A function of the script's that was compiled whole calls no module that anybody sees.
        or (not modules and compiled_code_in_use()),
        graphed=bool(discovery is not None and discovery.watcher.interval.replays) or _graphed(modules),
        dropout=any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in everything),
        graph_breaks=graph_breaks(),
        recompiles=recompiles,
        compilations=compilations,
        updates_compiled=training.updates_compiled,
        flags=flags_of(everything, seen),
        create_graph=bool(watcher is not None and watcher.graph_line),
        clips_scaled=bool(seen.clipped_scaled),
        stack_us=statistics.median(seen.stack_us) if seen.stack_us else 0.0,
        set_at={**settings.lines(), **_seen_at(seen, watcher)},
        cpu_threads=torch.get_num_threads(),
        env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    )


def _of_updates(training: Training, seen: Observations) -> dict[str, Any]:
    optimizers = sorted(training.optimizers, key=_values, reverse=True)
    return {
        "optimizers": tuple(type(o).__name__ for o in optimizers),
        "optimizer_foreach": _option(optimizers, "foreach"),
        "optimizer_fused": bool(_option(optimizers, "fused")),
        "optimizer_own": any(not _of_torch(type(optimizer).step) for optimizer in optimizers[:1]),
        "zero_grad_to_none": seen.zero_grad_to_none is not False,
        "gradients_stay": _gradients_stay(optimizers),
        "autocast": dtype_name(seen.autocast),
        "grad_scaler": any(scaler.is_enabled() for scaler in training.scalers),
    }


def _gradients_stay(optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether some have been written to more often than the backward passes and clipping of one step do."""
    held = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None and p.grad._version >= WRITTEN_BEFORE for p in held)


def _of_processes(device: torch.device, everything: list[nn.Module]) -> dict[str, Any]:
    world, backend = _world(device)
    return {
        "data_parallel": any(isinstance(m, nn.DataParallel) for m in everything),
        "data_parallel_us": _data_parallel_us(everything),
        "distributed": _distributed(everything),
        "world_size": world,
        "backend": backend,
        "sync_batchnorm": sum(isinstance(m, nn.SyncBatchNorm) for m in everything),
    }


def _convs(training: Training, seen: Observations) -> Iterator[ConvFact]:
    done: set[int] = set()
    names = module_names(training.roots)  # as the trace's rows have them
    for root in training.roots:
        leaves = [module for module in root.module.modules() if next(module.children(), None) is None]
        for position, module in enumerate(leaves):
            if not isinstance(module, nn.modules.conv._ConvNd) or id(module) in done:
                continue
            done.add(id(module))
            call = seen.convs.get(id(module))
            if call is not None:
                normed = call.followed_by_bn
            else:
                # Not seen running (compiled, or out of this step): the order of registration is the order of most forwards.
                following = leaves[position + 1] if position + 1 < len(leaves) else None
                normed = bool(
                    following is not None
                    and subtracts_means(following, module)
                    and following.num_features == module.out_channels
                )
            yield ConvFact(
                module=names[id(module)].partition("|")[0],
                in_channels=module.in_channels,
                out_channels=module.out_channels,
                kernel=tuple(module.kernel_size),
                stride=tuple(module.stride),
                padding=_padding(module),
                dilation=tuple(module.dilation),
                groups=module.groups,
                bias=module.bias is not None,
                transposed=bool(module.transposed),
                followed_by_bn=normed,
                input_shape=call.input_shape if call is not None else (),
                dtype=dtype_name(call.dtype) if call is not None else dtype_name(module.weight.dtype),
                layout="" if call is None else "nhwc" if call.channels_last else "nchw",
            )


def _padding(module: Any) -> tuple[int, ...]:
    if module.padding == "same":
        return tuple(d * (k - 1) // 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    if module.padding == "valid":
        return (0,) * len(module.kernel_size)
    return tuple(module.padding)


def _values(optimizer: torch.optim.Optimizer) -> int:
    """How many values it updates."""
    return sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])


def _seen_at(seen: Observations, watcher: StepWatcher | None) -> dict[str, str]:
    """Lines of the script's that were seen to do what they do, as they ran."""
    found = {"clips_scaled": seen.clipped_scaled, "create_graph": watcher.graph_line if watcher is not None else ""}
    return {name: line for name, line in found.items() if line}


def _of_torch(step: Any) -> bool:
    return getattr(step, "__module__", "").startswith("torch.optim")


def _option(optimizers: list[torch.optim.Optimizer], name: str) -> bool | None:
    """Whether the first, with all of its groups, was told to; None where it is left to torch."""
    values = [group.get(name) for optimizer in optimizers[:1] for group in optimizer.param_groups]
    known = [bool(value) for value in values if value is not None]
    return all(known) if known and len(known) == len(values) else None


def _mostly_channels_last(convs: tuple[ConvFact, ...], everything: list[nn.Module]) -> bool:
    layouts = [conv.layout for conv in convs if conv.layout and len(conv.input_shape) > 3]
    if layouts:
        return 2 * layouts.count("nhwc") > len(layouts)
    return _weights_channels_last(everything)


def _weights_channels_last(everything: list[nn.Module]) -> bool:
    """Most of those whose layout can be told: one channel (a depthwise convolution's) or one pixel is contiguous both ways."""
    weights = [
        m.weight for m in everything if isinstance(m, nn.modules.conv._ConvNd) and isinstance(m.weight, torch.Tensor)
    ]
    told = [layouts.is_channels_last(w) for w in weights if layouts.is_channels_last(w) or layouts.is_nchw(w)]
    return 2 * sum(told) > len(told)


def _layout_breaks(training: Training, seen: Observations) -> tuple[LayoutBreak, ...]:
    """What was seen to return NCHW of NHWC, under the roots, the most often first."""
    names = module_names(training.roots)
    found = []
    for (module, what), times in seen.layouts.breaks.items():
        path, _, kind = names.get(module, "").partition("|")
        if path:
            found.append((times, LayoutBreak(module=path, module_type=kind, what=what)))
    return tuple(entry for _, entry in sorted(found, key=lambda pair: -pair[0]))


def _batches_drawn(watcher: StepWatcher | None) -> int:
    return watcher.interval.batches if watcher is not None else 0


def _data_parallel_us(everything: Iterable[nn.Module]) -> float | None:
    """The walk that nn.DataParallel over one device makes before each forward, timed here."""
    wrapped = [m.module for m in everything if isinstance(m, nn.DataParallel) and len(m.device_ids) == 1]
    if not wrapped:
        return None

    def walk() -> float:
        begin = time.perf_counter()
        for module in wrapped:
            for tensor in chain(module.parameters(), module.buffers()):
                _ = tensor.device
        return (time.perf_counter() - begin) * 1e6

    return statistics.median(walk() for _ in range(5))


def _distributed(everything: list[nn.Module]) -> str:
    names = {type(m).__name__ for m in everything}
    if any(name.startswith(("FullyShardedDataParallel", "FSDP")) for name in names):
        return "fsdp"
    return "ddp" if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in everything) else ""


def _world(device: torch.device) -> tuple[int, str]:
    """How many ranks there are, and the backend that carries tensors of this device.

    A group may have one for each device ("cpu:gloo,cuda:nccl"), and has where the script names none.
    """
    if not ranks.in_group():
        return 1, ""
    distributed = torch.distributed
    by_device = dict(part.split(":") for part in distributed.get_backend_config().split(","))
    return distributed.get_world_size(), by_device.get(device.type, str(distributed.get_backend()))


def _graphed(modules: list[nn.Module]) -> bool:
    # `make_graphed_callables` puts a closure of its own in place of the module's forward.
    return any("make_graphed" in getattr(m.__dict__.get("forward"), "__qualname__", "") for m in modules)


def flags_of(everything: list[nn.Module], seen: Observations) -> dict[str, bool]:
    # What a part of the step alone runs under may be as before by now: a context manager around forward.
    convs = seen.convs.values()
    flags = {
        "cudnn_enabled": torch.backends.cudnn.enabled and all(conv.cudnn for conv in convs),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic or any(conv.deterministic for conv in convs),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled() or bool(seen.stack_us),
        "uses_cupy": "cupy" in sys.modules,
    }
    wrappers = [m for m in everything if isinstance(m, nn.parallel.DistributedDataParallel)]
    if wrappers:
        flags["find_unused_parameters"] = any(m.find_unused_parameters for m in wrappers)
        flags["no_sync"] = seen.no_sync
    flags.update(tf32_flags())
    return flags


def tf32_flags() -> dict[str, bool]:
    """Which fp32 products may run as TF32: by operation where torch has such a setting (2.9): kernels go by it, and asking for the one before it warns there, or raises
    in a script that has used both. NVIDIA's libraries go by `NVIDIA_TF32_OVERRIDE=0` before either.
    """
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return {"tf32_conv": False, "tf32_matmul": False}
    backends: Any = torch.backends
    try:
        conv, matmul = backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision
    except AttributeError:
        return {"tf32_conv": backends.cudnn.allow_tf32, "tf32_matmul": backends.cuda.matmul.allow_tf32}
    return {"tf32_conv": conv == "tf32", "tf32_matmul": matmul == "tf32"}
