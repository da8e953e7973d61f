"""Volumes in a captured graph, seen as images: what works on rows of channels does not ask how many dimensions the pixels have.

A norm, an activation or a sum over [N, C, D, H, W] is one over [N, C, D * H, W], a view in NCDHW as in NDHWC. Here the graph says so: such a
node works on the view, and its result is viewed back. Then the families' patterns, written for images, find their places in networks
of volumes; what they leave alone runs as it did, on the view. A row of norm, sum and activation has one view before it and one behind.

In the same way signals [N, C, L] in NLC, as transforms/signals.py lays them out, are images [N, C, 1, L].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import match

_NORMS = {F.batch_norm, F.group_norm, F.instance_norm}
_CONVOLUTIONS = {F.conv3d, F.conv_transpose3d}
SIGNAL, IMAGE, VOLUME = 3, 4, 5


def as_images(graph: fx.Graph) -> None:
    """Put norms of volumes and signals, and the activations and sums behind them or behind a convolution's bias, on views of images."""
    for node in list(graph.nodes):
        if node.op not in ("call_function", "call_method") or node._erased:
            continue
        terms = _terms(node)
        if terms and all(_is_flat(term) for term in terms):
            _move(node, terms)
    _without_round_trips(graph)


def seen_as_image(node: fx.Node) -> None:
    """Have all users take the view back of the image of this volume, for who works on images; unless the image is all that is taken."""
    value = match.value(node)
    if value is None or value.dim() != VOLUME or not _is_flat(node):
        return
    if all(image_of(user) is node for user in node.users):
        return
    users = list(node.users)
    with node.graph.inserting_after(node):
        image = _image(node.graph, node)
    with node.graph.inserting_after(image):
        back = _back(image, value)
    for user in users:
        user.replace_input_with(node, back)


def image_of(node: Any) -> fx.Node | None:
    """The volume or signal that this node is the image of; None when it is no such view."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    if (node.target is torch.flatten and node.args[1:] == (2, 3)) or (
        node.target is torch.unsqueeze and node.args[1:] == (2,)
    ):
        whole, image = match.value(node.args[0]), match.value(node)
        if whole is not None and image is not None and image.dim() == IMAGE and isinstance(node.args[0], fx.Node):
            return node.args[0]
    return None


def _terms(node: fx.Node) -> list[fx.Node]:
    """The operands of more than two dimensions that move with the node; none where it stays."""
    result = match.value(node)
    if result is None or result.dim() not in (SIGNAL, VOLUME):
        return []
    first = match.operand(node)
    if not isinstance(first, fx.Node):
        return []
    if node.target in _NORMS or _is_mean(node):
        return [first]
    if match.activation(node) is not None:
        return [first] if _made_by_image(first) or _biased(first) else []
    both = match.operands(node, match.ADD)
    if both is None or not all(isinstance(one, fx.Node) for one in both):
        return []
    alike = all((value := match.value(one)) is not None and value.shape == result.shape for one in both)
    return list(both) if alike and any(_made_by_image(one) or _biased(one) for one in both) else []


def _is_mean(node: fx.Node) -> bool:
    """Whether it pools whole volumes."""
    if node.target is not F.adaptive_avg_pool3d:
        return False
    size = match.bound(node, ("input", "output_size"), {}).get("output_size")
    return size == 1 or (isinstance(size, (tuple, list)) and tuple(size) == (1, 1, 1))


def _made_by_image(node: fx.Node) -> bool:
    """Whether it is the view back of an image."""
    return node.op == "call_function" and node.target in (torch.unflatten, torch.squeeze) and "image" in node.meta


def _biased(node: fx.Node) -> bool:
    """Whether it is a convolution of volumes with a bias, which a kernel could add."""
    if node.op != "call_function" or node.target not in _CONVOLUTIONS:
        return False
    return (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) is not None


def _is_flat(node: fx.Node) -> bool:
    """Whether its image is a view: planes follow each other without a gap; a signal's channels lie side by side."""
    value = match.value(node)
    if value is None or match.static_shape(value) is None or match.empty(value):
        return False
    if value.dim() == VOLUME:
        return value.stride(2) == value.stride(3) * value.shape[3]
    return value.dim() == SIGNAL and value.stride(1) == 1 and value.stride(2) == value.shape[1]


def _move(node: fx.Node, terms: list[fx.Node]) -> None:
    graph, result = node.graph, match.value(node)
    if result is None:
        return
    with graph.inserting_before(node):
        images = {term: _image(graph, term) for term in dict.fromkeys(terms)}
    for term, image in images.items():
        node.replace_input_with(term, image)
    if _is_mean(node):
        node.target, node.args, node.kwargs = F.adaptive_avg_pool2d, (images[terms[0]], (1, 1)), {}
    users = list(node.users)
    with graph.inserting_after(node):
        back = _back(node, result)
    node.meta["example_value"] = _viewed(result)
    for user in users:
        user.replace_input_with(node, back)


def _image(graph: fx.Graph, term: fx.Node) -> fx.Node:
    if _made_by_image(term) and isinstance(term.args[0], fx.Node):
        return term.args[0]
    value = match.value(term)
    if value is None:
        raise ValueError(f"{term.name} has no value")
    call: Callable[..., Any] = torch.flatten if value.dim() == VOLUME else torch.unsqueeze
    image = graph.call_function(call, (term, 2, 3) if value.dim() == VOLUME else (term, 2))
    image.meta.update({**term.meta, "example_value": _viewed(value)})
    return image


def _back(image: fx.Node, value: torch.Tensor) -> fx.Node:
    """The view back to `value`, at the insertion point."""
    back = (
        image.graph.call_function(torch.unflatten, (image, 2, tuple(value.shape[2:4])))
        if value.dim() == VOLUME
        else image.graph.call_function(torch.squeeze, (image, 2))
    )
    back.meta.update({**image.meta, "example_value": value, "image": True})
    return back


def _viewed(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(2, 3) if value.dim() == VOLUME else value.unsqueeze(2)


def _without_round_trips(graph: fx.Graph) -> None:
    """Views back that nobody reads leave the graph."""
    for node in reversed(list(graph.nodes)):
        if "image" in node.meta and _made_by_image(node) and not node.users:
            graph.erase_node(node)
