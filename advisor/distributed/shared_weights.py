"""FSDP2 around the model that the script's optimizer trains: each rank keeps a share of every weight, gradient and optimizer state.

PyTorch's `fully_shard` gathers a block's weights for its forward and its backward, and reduces its gradients to their shares. It puts other
parameters (DTensors) in the module's places; the optimizer's groups, its state and the first step's gradients follow here. `state_dict`s of
the model and the optimizer are the plain script's: whole tensors, gathered by all ranks together. What a checkpoint brings is dealt out again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

LEAST_SHARE, MOST_SHARE = 0.01, 0.25  # of all parameters, of a block that is gathered by itself


def blocks(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose weights are gathered together, inner ones only; what none of them holds is the root's own.

    A weight that two modules share has to be the root's: then there are no blocks.
    """
    whole = sum(p.numel() for p in root.parameters())
    places = sum(1 for module in root.modules() for p in module._parameters.values() if p is not None)
    return [] if places != len(list(root.parameters())) else list(_blocks(root, whole))


def _blocks(module: torch.nn.Module, whole: int) -> Iterator[torch.nn.Module]:
    for child in module.children():
        size = sum(p.numel() for p in child.parameters())
        container = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))  # which nobody calls
        if size < LEAST_SHARE * whole:
            continue
        if size <= MOST_SHARE * whole and not container:
            yield child
        elif any(True for _ in child.children()):
            yield from _blocks(child, whole)
        elif not container:
            yield child


def share(root: torch.nn.Module, *, copies: int = 1) -> dict[int, tuple[torch.Tensor, torch.nn.Parameter]]:
    """Between a backward pass and the optimizer's step. All ranks call this together.

    Args:
        copies: so many parts of the ranks each hold the whole, shared within the part; gradients' shares are then averaged over the parts.

    Returns:
        By its identity each parameter there was, which holds nothing any more, and the one in its place.
    """
    before = dict(root.named_parameters())
    kind = next(iter(before.values())).device.type
    ranks = torch.distributed.get_world_size()
    shape, names = ((ranks,), ("shares",)) if copies == 1 else ((copies, ranks // copies), ("copies", "shares"))
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    with torch.no_grad():
        for parameter in before.values():
            if not parameter.is_contiguous():  # a convolution's weight in NHWC: shares are rows of it
                parameter.data = parameter.data.contiguous()
    for block in (*blocks(root), root):
        fully_shard(block, mesh=mesh)
    now: dict[str, Any] = dict(root.named_parameters())
    for name, old in before.items():
        if old.grad is not None:
            now[name].grad = _dealt(old.grad, now[name])
            old.grad = None
        old.data = old.data.new_empty(0)  # the script's own lists may hold it
    for module in root.modules():
        module.register_state_dict_post_hook(_whole)
        module.register_load_state_dict_pre_hook(_deal_out)
    return {id(old): (old, now[name]) for name, old in before.items()}


def follow(optimizer: torch.optim.Optimizer, moved: dict[int, tuple[torch.Tensor, torch.nn.Parameter]]) -> None:
    """The optimizer trains the parameters that are in the places of those it was made with."""
    for group in optimizer.param_groups:
        group["params"] = [moved[id(p)][1] if id(p) in moved else p for p in group["params"]]
    for old in [p for p in optimizer.state if id(p) in moved]:
        new = moved[id(old)][1]
        values = optimizer.state.pop(old)
        optimizer.state[new] = {k: _dealt(v, new) if _like(v, new) else v for k, v in values.items()}
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "state": _gathered(state["state"])})
    optimizer.register_load_state_dict_pre_hook(_dealt_state)


def _dealt(value: torch.Tensor, parameter: Any) -> DTensor:
    """This rank's share of a tensor that all ranks have whole, as the parameter's is; nothing is sent."""
    whole = value.detach().to(parameter.device).contiguous()
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _like(value: Any, parameter: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape


def _gather(value: Any) -> Any:
    """The whole tensor, of all ranks' shares."""
    return value.detach().full_tensor()


def _gathered(values: Any) -> Any:
    """Whole tensors in the places of shares, in host memory."""
    if isinstance(values, DTensor):
        return _gather(values).cpu()
    return {name: _gathered(value) for name, value in values.items()} if isinstance(values, dict) else values


def _whole(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A module's `state_dict` has whole tensors."""
    for name in module._parameters:
        if isinstance(found := state.get(prefix + name), DTensor):
            state[prefix + name] = _gather(found)


def _deal_out(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """What a `state_dict` brings for the module's own parameters."""
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and _like(value, parameter):
            state[prefix + name] = _dealt(value, parameter)


def _dealt_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    places = [p for group in optimizer.param_groups for p in group["params"]]

    def share_of(index: Any, values: Any) -> Any:
        parameter = places[index] if isinstance(index, int) and index < len(places) else None
        if not isinstance(parameter, DTensor) or not isinstance(values, dict):
            return values
        return {name: _dealt(value, parameter) if _like(value, parameter) else value for name, value in values.items()}

    return {**state, "state": {index: share_of(index, values) for index, values in state["state"].items()}}
