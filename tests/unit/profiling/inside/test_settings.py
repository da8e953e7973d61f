"""The script's line that sets a flag, found in its sources."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from advisor.profiling.inside import settings


@pytest.fixture
def found(tmp_path: Path):
    """What is found in a main script of this text, and modules beside it."""

    def look(text: str, **modules: str) -> dict[str, str]:
        settings.of_file.cache_clear()
        loaded = {}
        for name, body in {"__main__": text, **modules}.items():
            path = tmp_path / f"{name.strip('_')}.py"
            path.write_text(body)
            module = types.ModuleType(name)
            module.__file__ = str(path)
            loaded[name] = module
        return {name: line.removeprefix(f"{tmp_path}/") for name, line in settings.lines(loaded).items()}

    return look


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import torch\ntorch.backends.cudnn.enabled = False\n", {"cudnn_enabled": "main.py:2"}),
        ("import torch.backends.cudnn as cudnn\n\n\ncudnn.enabled = False\n", {"cudnn_enabled": "main.py:4"}),
        ("from torch.backends import cudnn\ncudnn.benchmark, cudnn.enabled = True, False\n",
         {"cudnn_benchmark": "main.py:2", "cudnn_enabled": "main.py:2"}),
        ("import torch\nwith torch.backends.cudnn.flags(enabled=False):\n    pass\n", {"cudnn_enabled": "main.py:2"}),
        ("import torch\ndef calm():\n    torch.use_deterministic_algorithms(True)\n", {"deterministic_algorithms": "main.py:3"}),
        ("import torch\ntorch.set_num_threads(1)\n", {"cpu_threads": "main.py:2"}),
        ("import torch\nwith torch.autograd.detect_anomaly():\n    pass\n", {"anomaly": "main.py:2"}),
        ("from torch.autograd import set_detect_anomaly\nset_detect_anomaly(True)\n", {"anomaly": "main.py:2"}),
        ("trainer = Trainer(\n    detect_anomaly=True,\n)\n", {"anomaly": "main.py:2"}),
        ("from torch.nn.parallel import DistributedDataParallel as D\nnet = D(\n    net,\n    find_unused_parameters=True,\n)\n",
         {"find_unused_parameters": "main.py:4"}),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n", {"cpu_threads": "main.py:2"}),
        ("# torch.backends.cudnn.enabled = False\nx = 'cudnn.enabled = False'\n", {}),
        ("model.enabled = False\nconv.benchmark = 1\n", {}),
        ("def broken(:\n  cudnn\n", {}),
    ],
)  # fmt: skip
def test_the_line_is_told_however_it_is_written(found, text, told):
    assert found(text) == told


def test_a_module_of_the_scripts_own_is_searched_as_well_behind_the_script(found):
    text = "import torch\ntorch.backends.cudnn.deterministic = True\n"
    assert found("import setup\n", setup=text)["cudnn_deterministic"].endswith("setup.py:2")
    assert found("from torch.backends import cudnn\n\ncudnn.deterministic = True\n", setup=text) == {
        "cudnn_deterministic": "main.py:3"
    }


def test_of_two_lines_the_last_one_counts(found):
    assert found("import torch\ntorch.set_num_threads(1)\ntorch.set_num_threads(4)\n") == {"cpu_threads": "main.py:3"}
