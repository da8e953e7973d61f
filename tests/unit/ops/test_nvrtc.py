"""Compiling ahead, with a stand-in for CuPy's modules."""

from __future__ import annotations

import threading

import pytest

from advisor.ops import catalog, nvrtc


def test_every_variant_is_compiled_once_and_a_refused_one_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    lock = threading.Lock()

    class Module:
        def __init__(self, name: str, defines: tuple[tuple[str, int], ...]) -> None:
            self.variant = name, defines

        def compile(self) -> None:
            with lock:
                compiled.append(self.variant)
            if dict(self.variant[1])["ACT"] == 1:
                raise RuntimeError("planted")

    monkeypatch.setattr(nvrtc, "_module", lambda name, defines, device: Module(name, defines))
    variants = catalog.get("batchnorm_act").variants()
    nvrtc.warm((*variants, *variants))
    assert sorted(compiled) == sorted((name, tuple(defines.items())) for name, defines in variants)
