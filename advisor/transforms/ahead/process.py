"""The process beside: it compiles recorded graphs, forward and backward, and leaves what Inductor made in its caches on disk.

Each graph goes through Dynamo once more, which knows its tensors as it knew the script's, with inputs of no particular values; nothing is
run. Dynamo orders inputs by first use as it traces; they are put back into the recorded order, by which the cache knows the graph.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LOOKS_EVERY_S = 1.0


def main(files: Sequence[str]) -> int:
    """Compile these; 0 where all of them could be."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    failed = 0
    for file in files:
        try:
            compile_recorded(Path(file))
        except Exception as error:  # it is compiled in the loop then, as if nobody had tried
            print(f"{Path(file).name}: {type(error).__name__}: {error}", file=sys.stderr)
            failed = 1
    return failed


class _Made(Exception):
    """A graph is compiled, and is not to be run."""


def compile_recorded(file: Path, compiler: Callable[..., Any] | None = None) -> None:
    """Compile one graph with the settings that it was recorded under. `compiler`: in place of Inductor's.

    Raises:
        Exception: whatever Dynamo or Inductor raise.
    """
    import torch
    import torch._dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    from advisor.core import storage
    from advisor.ops import catalog
    from advisor.transforms.ahead import graph_text
    from advisor.transforms.ahead.recording import Recorded, set_flags

    recorded = storage.from_plain(Recorded, json.loads(file.read_text(encoding="utf-8")))
    for family in catalog.FAMILIES if "torch.ops.advisor" in str(recorded.graph) else ():
        if family.captured:
            _ = family.rewrite  # its operations are registered with torch
    graph = graph_text.read(recorded.graph)
    set_flags(recorded.flags)
    inputs = [given.made() for given in recorded.inputs]
    patches = list_mode_options(recorded.mode) if recorded.mode != "default" else None
    made = False

    def backend(traced: Any, given: Sequence[Any]) -> Any:
        nonlocal made
        ordered = in_order_of(traced, given, graph, inputs)
        (compiler or compile_fx)(traced, ordered, config_patches=patches)
        made = True
        raise _Made

    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor.patch(recorded.inductor))
        stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
        torch.set_autocast_cache_enabled(recorded.autocast_cache)
        for device, dtype in recorded.autocasts.items():
            stack.enter_context(
                torch.autocast(device, dtype=getattr(torch, dtype), cache_enabled=recorded.autocast_cache)
            )
        try:
            compiled: Any = torch.compile(graph.forward, backend=backend, dynamic=False)
            compiled(*inputs)
        except Exception:
            if not made:
                raise


def in_order_of(traced: Any, given: Sequence[Any], graph: Any, inputs: Sequence[Any]) -> list[Any]:
    """`traced` takes its inputs as `graph` takes `inputs`, under the same names; returns those of `given` so.

    Raises:
        ValueError: where it has others.
    """
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    holders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if {id(tensor) for tensor in given} != set(places) or len(holders) != len(names):
        raise ValueError(
            f"traced again it takes {len(holders)} inputs, and not the {len(names)} that it was recorded with"
        )
    pairs = sorted(zip(holders, given, strict=True), key=lambda pair: places[id(pair[1])])
    first = next(iter(traced.graph.nodes))
    for holder, _ in pairs:
        if holder is first:
            first = first.next
        else:
            first.prepend(holder)
    for holder, tensor in pairs:
        holder.name = holder.target = names[places[id(tensor)]]
    traced.recompile()
    return [tensor for _, tensor in pairs]


def _end_with(parent: int) -> None:
    """This process is for nobody once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(LOOKS_EVERY_S)
    os._exit(1)
