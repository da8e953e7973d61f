"""What holds for every test: none sees what an earlier one in the same process has compiled or drawn."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import zlib
from collections.abc import Callable, Iterator

import machine
import pytest
from thinned import covering

try:
    from hypothesis import settings
except ImportError:  # the GPU tests do without
    pass
else:
    # An example's time says more of the machine: one that takes 20 ms took 550 beside other tests' writes to disk.
    settings.register_profile("any machine", deadline=None)
    settings.load_profile("any machine")


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`declare(id, **fields)`: for this test there is a row of this id, or the one that there is says this."""
    from advisor.core.transform_row import Row, Stage
    from advisor.core.transform_table import ROWS

    def declared(identifier: str, **fields: object) -> None:
        made = ROWS.get(identifier) or Row(id=identifier, title=identifier, code="", stage=Stage.NORMS)
        monkeypatch.setitem(ROWS, identifier, dataclasses.replace(made, **fields))

    return declared


_frozen = 0  # modules that were imported when the heap was frozen; 0 when it is not. Python counts what is frozen one by one: 0.1 s a test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Modules stay: a collection, of which tests force many, need not walk through a million objects of torch's each time."""
    global _frozen
    if item.path.parent.name == "testing":  # what is tested there freezes and thaws the heap itself
        gc.unfreeze()
        _frozen = 0
    elif len(sys.modules) >= _frozen + 100:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def this_machine() -> Iterator[None]:
    """Tests, and what they start, use a cache folder of their own, in which this machine's rates lie planted. In this process a step behind
    one at which advisor was held up counts: on a busy machine most are, and too few would be left. No gate does less because it is slow."""
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            patch.setattr("advisor.loop.interval.LISTENER_NS", 10**12)
            for limit in ("layers.MOST_S", "plain.LONG_S", "room.LONG_S"):
                patch.setattr(f"advisor.trials.numerics.{limit}", 10**9)
        patch.setenv("XDG_CACHE_HOME", str(machine.cache_folder()))
        machine.plant()
        yield


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Bytes give no id of their own: a compressed text holds the time it was made at, and workers that collect it a second apart refuse
    to run. So a case is named by its place."""
    return argname if isinstance(val, bytes | bytearray) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `each_value` those cases run always that have, between them, each value of each parameter; the others are long."""
    cases: dict[tuple[object, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("each_value"):
            cases.setdefault((item.path, item.originalname), []).append(item)
    for alike in cases.values():
        kept = covering([{name: id(value) for name, value in item.callspec.params.items()} for item in alike])
        for number, item in enumerate(alike):
            if number not in kept:
                item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def dynamo_begins_anew() -> Iterator[None]:
    """Dynamo's counters and compiled code are the process's; advisor reads both to tell what a script does."""
    _forget_compiled_code()  # what a fixture of wider scope has compiled
    yield
    _forget_compiled_code()


@pytest.fixture(autouse=True)
def draws_of_its_own(request: pytest.FixtureRequest) -> None:
    """Each test has its own random numbers, the same in any order and in any process."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A kernel's illegal address ends this process's use of the GPU: no test after it can say anything."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{item.nodeid} has lost the GPU: {str(error).splitlines()[0]}", returncode=1)


def _forget_compiled_code() -> None:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not any(utils.counters.values()):
        return
    import torch

    torch._dynamo.reset()
    utils.counters.clear()


@pytest.fixture
def bf16_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast is left out on a CPU that bf16 slows down; for tests of which that is not the point."""
    monkeypatch.setattr("advisor.transforms.autocast._cpu_has_bf16", lambda: True)
