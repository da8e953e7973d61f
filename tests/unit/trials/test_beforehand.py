"""What a search needs is compiled while the script is profiled, and ends with the search."""

import signal
import sys

import pytest

from advisor.trials import beforehand


@pytest.fixture
def machine(monkeypatch, tmp_path):
    (tmp_path / "driver").touch()
    monkeypatch.setattr(beforehand, "DRIVERS", (tmp_path / "none", tmp_path / "driver"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(beforehand.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(beforehand, "MODULE", "this")  # prints, and ends


def test_it_compiles_on_a_gpu_machine_with_cores_to_spare(machine, monkeypatch):
    process = beforehand.compile_ahead()
    assert process.args == [sys.executable, "-m", "this"]
    assert process.wait() == 0
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "-1")
        assert beforehand.compile_ahead() is None
    with monkeypatch.context() as without:
        without.setattr(beforehand, "DRIVERS", ())
        assert beforehand.compile_ahead() is None
    monkeypatch.setattr(beforehand.os, "cpu_count", lambda: 2)
    assert beforehand.compile_ahead() is None


def test_what_is_not_done_ends_with_the_search(machine, monkeypatch, tmp_path):
    (tmp_path / "goes_on.py").write_text("import time\nwhile True: time.sleep(1)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(beforehand, "MODULE", "goes_on")
    process = beforehand.compile_ahead()
    beforehand.end(process)
    assert process.returncode == -signal.SIGKILL


def test_an_interpreter_that_does_not_start_is_no_fault(machine, monkeypatch):
    monkeypatch.setattr(beforehand.sys, "executable", "/nowhere/python")
    assert beforehand.compile_ahead() is None


def test_the_module_is_there():
    import importlib.util

    assert importlib.util.find_spec(beforehand.MODULE) is not None
