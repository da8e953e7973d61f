"""Cores beside a GPU, in planted /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.profiling.machine import cores

GPUS = {"0000:17:00.0": "0-3,8-11", "0000:3d:00.0": "0-3,8-11", "0000:dc:00.0": "4-7,12-15"}
EVERY = set(range(16))


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """Two nodes of four cores with two threads each; two GPUs on the first, one on the second, and a network card."""
    plant(tmp_path, GPUS)
    card = tmp_path / "bus/pci/devices/0000:18:00.0"
    card.mkdir()
    for name, value in {"vendor": "0x15b3", "class": "0x020000", "local_cpulist": "0-3,8-11"}.items():
        (card / name).write_text(value + "\n")
    for cpu in EVERY:
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def plant(folder: Path, gpus: dict[str, str]) -> None:
    for address, near in gpus.items():
        device = folder / "bus/pci/devices" / address
        device.mkdir(parents=True)
        for name, value in {"vendor": "0x10de", "class": "0x030200", "local_cpulist": near}.items():
            (device / name).write_text(value + "\n")


def test_the_cores_of_the_gpus_node_that_may_be_used(sys: Path) -> None:
    assert cores.of_node("0000:dc:00.0", EVERY, sys) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert cores.of_node("0000:dc:00.0", {0, 1, 12}, sys) == {12}


def test_gpus_of_one_node_divide_its_whole_cores(sys: Path) -> None:
    shares = [cores.of_share(address, EVERY, sys) for address in GPUS]
    assert shares == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]


def test_more_gpus_than_cores_and_a_machine_that_tells_nothing_have_no_share(sys: Path, tmp_path: Path) -> None:
    assert cores.of_share("0000:17:00.0", {0, 8}, sys) == set()
    assert cores.of_share("0000:99:00.0", EVERY, sys) == set()
    assert cores.of_node("0000:17:00.0", EVERY, tmp_path / "none") == set()
    assert cores.of_share("0000:17:00.0", EVERY, tmp_path / "none") == set()


def test_cores_read_as_the_kernel_writes_them() -> None:
    assert cores.text({0, 1, 2, 8, 10, 11}) == "0-2,8,10-11"
    assert cores.pci_address(0, 0xDC, 0) == "0000:dc:00.0"
