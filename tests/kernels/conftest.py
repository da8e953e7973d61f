"""Fixtures for the kernels' tests."""

from __future__ import annotations

from emulation.device import emulated

__all__ = ["emulated"]
