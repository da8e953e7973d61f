"""What a script's text says against dividing its batches, with file and line. No torch: it is read before anything runs.

Only what shows in the text and not in the running script: losses over pairs of a batch's samples, samples mixed within a batch, sums
where a mean would not depend on how the batch is divided. What shows in the run is refused there (shards.py, gradients.py, joining.py), and
the proof (trials/ranks.py) finds what neither has seen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOST_FILES, _MOST_BYTES = 64, 2_000_000
# Losses over pairs of a batch, by the names that their papers gave them.
_PAIRED_LOSS = re.compile(
    r"(?i)(nt_?xent|info_?nce|sup_?con|contrastive|clip_?loss|n_?pair|barlow_?twins|vicreg|batch_?hard)"
)
_EMBEDDED = re.compile(r"(?i)(feat|embed|emb\b|emb_|proj|\bz(_?\w)?\b)")
_MIXERS = frozenset({"MixUp", "CutMix", "Mixup", "FastCollateMixup", "RandomMixup", "RandomCutmix"})
_MATRIX = frozenset({"mm", "matmul", "cdist"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One place."""

    line: str  # "train.py:42"
    why: str


def read(script: Path) -> list[Refusal]:
    """What stands against dividing in the script and in the modules beside it that it imports; nothing where it cannot be read."""
    found: list[Refusal] = []
    waiting = [script]
    seen: set[Path] = set()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            if path.stat().st_size > _MOST_BYTES:
                continue
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        found += sorted(_of(tree, path), key=lambda refusal: int(refusal.line.rpartition(":")[2]))
        waiting += [file for name in _imported(tree) if (file := _beside(script.parent, name)) is not None]
    return found


def _of(tree: ast.AST, path: Path) -> Iterator[Refusal]:
    drawn = _orders(tree)
    for node in ast.walk(tree):
        why = ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            why = _pairs(node.left, node.right)
        elif isinstance(node, ast.Call):
            why = _call(node)
        elif isinstance(node, ast.Subscript):
            why = _mixing(node, drawn)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            why = _import(node)
        if why:
            yield Refusal(line=f"{path}:{getattr(node, 'lineno', 0)}", why=why)


def _import(node: ast.Import | ast.ImportFrom) -> str:
    if any(name.split(".")[0] == "pytorch_metric_learning" for name in _names(node)):
        return "losses of pytorch_metric_learning compare the samples of a batch"
    names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
    if any(name in _MIXERS for name in names):
        return "samples are mixed with others of the batch"
    return ""


def _call(node: ast.Call) -> str:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if _PAIRED_LOSS.search(name):
        return f"{name} compares the samples of a batch, by its name"
    if name in _MIXERS and isinstance(node.func, ast.Attribute):
        return "samples are mixed with others of the batch"
    if name == "einsum" and node.args and isinstance(node.args[0], ast.Constant):
        return _summed(str(node.args[0].value), node.args[1:])
    if name in _MATRIX and len(node.args) >= 2:
        return _pairs(node.args[0], node.args[1], same=name == "cdist")
    if name == "cosine_similarity" and len(node.args) >= 2:
        one, other = (ast.unparse(argument) for argument in node.args[:2])
        if "unsqueeze(0)" in one + other and "unsqueeze(1)" in one + other:
            return "each sample of the batch is compared with each other"
    if name == "flip" and node.args and isinstance(node.func, ast.Attribute):
        first = node.args[0]
        if isinstance(first, ast.Constant) and first.value == 0 and _is_batch(node.func.value):
            return "samples are mixed with others of the batch"
    for keyword in node.keywords:
        if keyword.arg == "reduction" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "sum":
            return "a loss that is the sum over the batch is not the mean of its parts' losses"
    return ""


def _pairs(left: ast.expr, right: ast.expr, *, same: bool = False) -> str:
    """A matrix of a batch's samples by its samples: a tensor's product with its own transpose, or distances within it."""
    one, other = ast.unparse(left), ast.unparse(right)
    for end in (".t()", ".T", ".mT", ".transpose(0, 1)", ".permute(1, 0)"):
        if other == one + end:
            return "each sample of the batch is compared with each other"
        if other.endswith(end) and _EMBEDDED.search(one) and _EMBEDDED.search(other[: -len(end)]):
            return "each sample of the batch is compared with each other"
    return "each sample of the batch is compared with each other" if same and one == other else ""


def _summed(equation: str, operands: list[ast.expr]) -> str:
    """An einsum of a tensor with itself, or of two of embeddings, that leaves both first axes: "nc,mc->nm"."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    if len(operands) != 2 or not first or not second or len(output) != 2:
        return ""
    names = [ast.unparse(operand) for operand in operands]
    paired = names[0] == names[1] or all(map(_EMBEDDED.search, names))
    crosses = first[0] != second[0] and {first[0], second[0]} == set(output)
    return "each sample of the batch is compared with each other" if paired and crosses else ""


def _orders(tree: ast.AST) -> frozenset[str]:
    """Names that hold an order drawn by `randperm`, on whatever device."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "randperm(" in ast.unparse(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(found)


def _mixing(node: ast.Subscript, drawn: frozenset[str]) -> str:
    index = node.slice
    if isinstance(index, ast.Tuple) and index.elts:
        index = index.elts[0]
    permuted = isinstance(index, ast.Call) and ast.unparse(index.func).endswith("randperm")
    permuted |= isinstance(index, ast.Name) and index.id in drawn
    return "samples are mixed with others of the batch" if permuted and _is_batch(node.value) else ""


def _is_batch(node: ast.expr) -> bool:
    """Whether this is named as the tensors of a batch are."""
    words = ("image", "input", "target", "label", "batch", "data", "x", "y", "img", "imgs")
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name.lower().rstrip("s_0123456789") in words or name.lower() in words


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]


def _imported(tree: ast.AST) -> list[str]:
    return [name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for name in _names(node)]


def _beside(folder: Path, name: str) -> Path | None:
    base = folder.joinpath(*name.split(".")) if name else folder
    return next((file for file in (base.with_suffix(".py"), base / "__init__.py") if name and file.is_file()), None)
