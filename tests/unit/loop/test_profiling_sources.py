from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advisor.loop import sources
from advisor.loop.sources import LIBRARY, PASSED_OVER, USER, Lines, user_line

PACKAGES = "/elsewhere/lib/python3.12/site-packages"


def code(path: str, text: str) -> dict[str, Any]:
    """The names that a file at `path` with this text defines."""
    names: dict[str, Any] = {}
    exec(compile(text, path, "exec"), names)
    return names


def asked() -> str:
    # Called as `look()` by the pretended files: the line told is the one of that call.
    return Lines().of(sys._getframe(1))


def test_files_are_the_users_a_librarys_or_passed_over() -> None:
    assert sources.kind(os.path.abspath(__file__)) == USER
    assert sources.kind(str(Path(torch.__file__).parents[1] / "torchvision" / "models" / "resnet.py")) == LIBRARY
    # Another prefix's packages: a virtual environment that sees the system's.
    assert sources.kind(f"{PACKAGES}/lightning/trainer.py") == LIBRARY
    assert sources.kind("/usr/lib/python3/dist-packages/numpy/core.py") == LIBRARY
    for path in (torch.nn.functional.__file__, sources.__file__, pytest.importorskip("copy").__file__, "<frozen os>"):
        assert sources.kind(os.path.abspath(path) if path[0] != "<" else path) == PASSED_OVER


def test_a_librarys_path_begins_with_its_package() -> None:
    assert sources.shown(f"{PACKAGES}/timm/models/resnet.py") == "timm/models/resnet.py"
    assert sources.shown(str(Path(torch.__file__).parents[1] / "monai" / "unet.py")) == "monai/unet.py"


def test_paths_are_shown_from_where_the_process_was_started(tmp_path, monkeypatch) -> None:
    path = os.path.join(os.getcwd(), "train.py")
    monkeypatch.chdir(tmp_path)  # as hydra does before the training begins
    assert sources.shown(path) == "train.py"
    assert sources.shown("/home/me/train.py") == "/home/me/train.py"


def test_what_a_framework_does_is_told_under_the_users_line_that_led_there() -> None:
    engine = code(
        f"{PACKAGES}/engine/loop.py", "def fit(step):\n    return step()\ndef log(look):\n    return look()\n"
    )
    script = code("/home/me/train.py", "def train(fit, look):\n    return fit(\n        look)\n")
    assert script["train"](engine["fit"], asked) == "/home/me/train.py:2 via engine/loop.py:2"
    callback = code("/home/me/callback.py", "def step():\n\n    return log(look)\n")
    callback.update(log=engine["log"], look=asked)
    assert script["train"](engine["fit"], callback["step"]) == "/home/me/callback.py:3 via engine/loop.py:4"


def test_the_users_own_call_inside_a_framework_is_told_alone() -> None:
    engine = code(f"{PACKAGES}/engine/loop.py", "def fit(step):\n    return step()\n")
    script = code("/home/me/train.py", "def step():\n    return look()\n")
    script["look"] = asked
    assert engine["fit"](script["step"]) == "/home/me/train.py:2"


def test_inside_a_module_of_a_library_its_own_line_says_most() -> None:
    model = code(f"{PACKAGES}/zoo/resnet.py", "def forward(self, look):\n    return look()\n")
    script = code("/home/me/train.py", "def step(model, look):\n    return model(look)\n")
    net = type("Net", (nn.Module,), {"forward": model["forward"]})()
    assert script["step"](net, asked) == "zoo/resnet.py:2"
    # A library's function that the user's own module calls is the user's affair.
    helper = code(f"{PACKAGES}/zoo/blur.py", "def blur(look):\n    return look()\n")
    own = code("/home/me/model.py", "def forward(self, look):\n    return blur(look)\n")
    own["blur"] = helper["blur"]
    net = type("Net", (nn.Module,), {"forward": own["forward"]})()
    assert script["step"](net, asked) == "/home/me/model.py:2 via zoo/blur.py:2"


def test_without_code_of_the_users_the_librarys_line_is_told() -> None:
    frame = sys._getframe()
    while frame.f_back is not None and sources.kind(os.path.abspath(frame.f_code.co_filename)) != LIBRARY:
        frame = frame.f_back  # pytest's own
    assert Lines().of(frame).partition(":")[0].endswith(".py")
    assert user_line().startswith("tests/")


def test_the_users_line_alone() -> None:
    engine = code(f"{PACKAGES}/engine/loop.py", "def draw(look):\n    return look()\n")
    script = code("/home/me/train.py", "def train(draw, look):\n    return draw(look)\n")
    assert script["train"](engine["draw"], lambda: Lines().users(sys._getframe(1))) == "/home/me/train.py:2"
