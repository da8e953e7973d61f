"""The precision audit for a terminal: what each layer's products run in, their error, and what the next cheaper precision would cost and save."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.analysis.convolutions import Product, products
from advisor.core.precision import Audited, PrecisionRecord
from advisor.core.profile import StepProfile
from advisor.core.roofline import limit_us
from advisor.core.units import counted, time_text
from advisor.reporting.page import clip_path

SHOWN = 30
# From the dearest on. What is cheaper than TF32 is half precision, of which bf16 needs no scaling of losses.
_CHEAPER = {"fp64": ("fp32",), "fp32": ("tf32", "bf16"), "tf32": ("bf16",)}
_NAMES = {"module": 30, "product": 15, "ran": 5, "error": 8, "cheaper": 8, "its error": 9, "saves": 9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A row with the next cheaper precision; `saves_us` is modelled: its time less what this machine needs at least; None where not known."""

    row: Audited
    cheaper: str
    saves_us: float | None


def priced(record: PrecisionRecord, profile: StepProfile) -> tuple[Priced, ...]:
    """All rows, those whose next cheaper precision would save most first."""
    known: dict[tuple[str, str], list[Product]] = {}
    for product in products(profile):
        known.setdefault((product.module, product.direction), []).append(product)
    found = [_priced(row, known.get((row.module, row.product), []), profile) for row in record.rows]
    return tuple(sorted(found, key=lambda p: (-(p.saves_us or 0.0), p.row.module, p.row.product)))


def _priced(row: Audited, of: Sequence[Product], profile: StepProfile) -> Priced:
    """`of`: the layer's products of this direction, one for each shape of input that it was called with."""
    cheaper = next((name for name in _CHEAPER.get(row.ran, ()) if name in row.errors), "")
    each = [_saves_us(product, cheaper, profile) for product in of if product.flops] if cheaper else []
    known = [saves for saves in each if saves is not None]
    return Priced(row=row, cheaper=cheaper, saves_us=sum(known) if known else None)


def _saves_us(product: Product, cheaper: str, profile: StepProfile) -> float | None:
    nbytes = product.nbytes / (2 if cheaper == "bf16" else 1)
    least = limit_us(profile.environment, nbytes=nbytes, flops=product.flops, dtype=cheaper)
    return max(0.0, product.total_us - least) if least > 0 else None


def precision_text(record: PrecisionRecord, profile: StepProfile, width: int) -> str:
    """The table, and who has switched what."""
    found = priced(record, profile)
    if not found:
        return "Precision: no convolution and no linear layer was seen."
    by = dict.fromkeys(f"{row.ran} ({row.by})" for row in record.rows)
    head = f"Precision  {', '.join(by)}; errors against fp64 on {counted(record.samples, 'sample')} of one step"
    lines = [*textwrap.wrap(head, max(width, 60)), _line(list(_NAMES))]
    for one in found[:SHOWN]:
        row = one.row
        lines.append(
            _line(
                [
                    row.module,
                    row.product,
                    row.ran,
                    "–" if row.error is None else f"{row.error:.1e}",
                    one.cheaper or "–",
                    f"{row.errors[one.cheaper]:.1e}" if one.cheaper else "–",
                    "–" if one.saves_us is None else f"≤ {time_text(one.saves_us)}",
                ]
            )
        )
    if len(found) > SHOWN:
        lines.append(f"  {len(found) - SHOWN} more in precision.json.")
    lines += [f"  {note}" for note in record.notes]
    return "\n".join(line.rstrip() for line in lines)


def _line(cells: list[str]) -> str:
    padded = (clip_path(text, size).ljust(size) for text, size in zip(cells, _NAMES.values(), strict=True))
    return "  " + "  ".join(padded)
