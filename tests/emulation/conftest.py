"""Fixtures for the tests of the emulation itself."""

from __future__ import annotations

from emulation.device import emulated

__all__ = ["emulated"]
