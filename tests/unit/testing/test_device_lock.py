"""One measurement at a time: in a process, and on a GPU over all processes."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from advisor.core.errors import AdvisorError
from advisor.testing import device_lock

GPU = torch.device("cuda", 0)


def test_a_process_measures_one_thing_at_a_time() -> None:
    with device_lock.alone(), pytest.raises(AdvisorError, match="one at a time"), device_lock.alone():
        pass
    with pytest.raises(KeyboardInterrupt), device_lock.alone():
        raise KeyboardInterrupt
    with device_lock.alone():
        pass


def _hold(path: str, entered: object, leave: object) -> None:
    device_lock.lock_file = lambda device: Path(path)
    with device_lock.locked(GPU):
        entered.set()
        leave.wait()


@pytest.mark.skipif(sys.platform == "win32", reason="no file locks of this kind")
def test_a_gpu_is_one_processs_at_a_time(tmp_path: Path) -> None:
    import fcntl

    path = tmp_path / "gpu.lock"
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(path), entered, leave))
    other.start()
    try:
        entered.wait()
        with open(path, "a") as handle:
            with pytest.raises(BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leave.set()
            other.join()
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        leave.set()
        other.join()
    assert other.exitcode == 0


def test_a_cpu_is_not_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_lock, "lock_file", lambda device: pytest.fail("locked"))
    with device_lock.locked(torch.device("cpu")):
        pass


def test_a_gpus_file_is_the_same_for_every_process_and_another_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    first, second = (device_lock.lock_file(torch.device("cuda", index)) for index in (0, 1))
    assert first == device_lock.lock_file(GPU)
    assert first != second
    assert "uuid-0" in first.name
