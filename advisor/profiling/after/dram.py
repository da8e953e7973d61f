"""DRAM counter samples laid over device records."""

from __future__ import annotations

from advisor.core.trace import DeviceTable, DramSamples


def spread(device: DeviceTable, samples: DramSamples) -> list[float]:
    """DRAM bytes of each device record: each sample shared among the records that ran in it, by length of overlap."""
    result = [0.0] * len(device.name)
    records = sorted(range(len(device.name)), key=device.start_ns.__getitem__)
    first = 0
    for a, b, read, written in sorted(
        zip(samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes, strict=True)
    ):
        if a <= 0 or b <= a:
            continue  # CUPTI leaves time stamps of unfilled samples at zero
        while first < len(records) and device.end_ns[records[first]] <= a:
            first += 1
        present: list[tuple[int, int]] = []
        position = first
        while position < len(records) and device.start_ns[records[position]] < b:
            i = records[position]
            beside = min(b, device.end_ns[i]) - max(a, device.start_ns[i])
            if beside > 0:
                present.append((i, beside))
            position += 1
        together = sum(beside for _, beside in present)
        for i, beside in present:
            result[i] += (read + written) * beside / together
    return result


def within(samples: DramSamples, start: int, end: int) -> float:
    """Bytes of the samples that lie in [start, end], whatever ran."""
    return sum(
        read + written
        for a, b, read, written in zip(
            samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes, strict=True
        )
        if a >= start and b <= end
    )
