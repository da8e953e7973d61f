"""What `einsum` of two arrays sums, as the product of matrices that it is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contraction:
    """A product, `axes` of its operands summed, whose dimensions `into` puts in the order asked for.

    Attributes:
        orders: of each operand's dimensions with those of the batch first: then rows and summed ones, or summed ones and columns.
        batch, rows, summed: how many dimensions are in both and kept, in the first alone, and in both and summed.
        depth: numbers that are summed for one.
    """

    axes: tuple[tuple[int, ...], tuple[int, ...]]
    orders: tuple[tuple[int, ...], tuple[int, ...]]
    into: tuple[int, ...]
    batch: int
    rows: int
    summed: int
    depth: int


def contraction(text: str, a: tuple[int, ...], b: tuple[int, ...]) -> Contraction | None:
    """Of subscripts such as "nchw,oc->nohw" and the shapes of two arrays; None where it is no product: a diagonal, an ellipsis, a sum over
    one array's own dimension, sizes that are broadcast.
    """
    given, arrow, kept = text.replace(" ", "").partition("->")
    first, comma, second = given.partition(",")
    letters = first + second
    if not comma or "," in second or not letters.isalpha() or (kept and not kept.isalpha()):
        return None
    if not arrow:
        kept = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if any(len(set(names)) < len(names) for names in (first, second, kept)) or not set(kept) <= set(letters):
        return None
    if (len(first), len(second)) != (len(a), len(b)):
        return None
    both = [letter for letter in first if letter in second]
    if any(a[first.index(letter)] != b[second.index(letter)] for letter in both):
        return None
    batch = [letter for letter in both if letter in kept]
    summed = [letter for letter in both if letter not in kept]
    rows, columns = [x for x in first if x not in second], [x for x in second if x not in first]
    if not summed or not set(rows + columns) <= set(kept) or not (rows or columns):
        return None
    made = [*batch, *rows, *columns]
    return Contraction(
        axes=(tuple(map(first.index, summed)), tuple(map(second.index, summed))),
        orders=(
            tuple(map(first.index, [*batch, *rows, *summed])),
            tuple(map(second.index, [*batch, *summed, *columns])),
        ),
        into=tuple(map(made.index, kept)),
        batch=len(batch),
        rows=len(rows),
        summed=len(summed),
        depth=math.prod(a[first.index(letter)] for letter in summed),
    )
