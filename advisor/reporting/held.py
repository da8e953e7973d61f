"""What holds a step's memory, as text: kinds, the modules and lines that keep most, and other ways with what they are foretold to take."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.analysis.activations import MemoryAlternative
from advisor.core.held import ACTIVATION, MemoryLook
from advisor.core.units import bytes_text, percent_text

_KINDS = (ACTIVATION, "parameter", "gradient", "optimizer", "buffer", "batch")
_NAMES = {ACTIVATION: "kept for the backward", "parameter": "parameters", "gradient": "gradients",
          "optimizer": "optimizer's state", "buffer": "buffers", "batch": "the batch"}  # fmt: skip
MOST = 12


def text(look: MemoryLook, others: Sequence[MemoryAlternative], *, batch: int, memory_bytes: int) -> str:
    """A page of it."""
    peak = look.most_bytes
    lines = [
        f"Memory of a step  {bytes_text(peak)} at its peak"
        + (
            f", {bytes_text(look.reserved_bytes)} reserved, {bytes_text(look.total_bytes)} on the device"
            if look.peak_bytes
            else ""
        )
    ]
    for kind in _KINDS:
        if nbytes := look.of(kind):
            lines.append(f"  {_NAMES[kind]:<24}{bytes_text(nbytes):>12}{percent_text(nbytes / peak):>8}")
    if (rest := look.peak_bytes - look.known_bytes) > 0:
        lines.append(f"  {'workspaces, temporaries':<24}{bytes_text(rest):>12}{percent_text(rest / peak):>8}")
    if (unused := look.reserved_bytes - look.peak_bytes) > 0:
        lines.append(f"  {'reserved and unused':<24}{bytes_text(unused):>12}")
    kept = [row for row in look.rows if row.kind == ACTIVATION]
    lines += ["", f"Kept for the backward  {len(kept)} places, the largest:"]
    lines += [
        f"  {bytes_text(row.nbytes):>12}  {row.module or 'outside of models':<36} {row.source}" for row in kept[:MOST]
    ]
    lines += ["", "Alternatives, predicted from these sizes", f"  {'':<26}{'peak':>12}{'step':>18}"]
    for other in others:
        low, high = other.step
        step = "as it is" if low == high == 1.0 else f"{low:.2f} to {high:.2f} ×"
        fits = "" if not memory_bytes or other.nbytes <= memory_bytes else "  does not fit"
        lines.append(f"  {other.name:<26}{bytes_text(other.nbytes):>12}{step:>18}{fits}  {other.note}".rstrip())
    if batch and look.batch_size:
        lines += [
            "",
            f"Largest batch that fits in {bytes_text(memory_bytes)}: about {batch:,} samples, now {look.batch_size:,}",
        ]
    return "\n".join(lines) + "\n"
