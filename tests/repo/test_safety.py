"""What advisor's own code may not do: run text as code, unpickle files, start shells, or open connections (docs/threat-model.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ADVISOR = Path(__file__).resolve().parents[2] / "advisor"

CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "__import__": "imports by a name from outside",
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "marshal.loads": "unmarshals",
    "shelve.open": "unpickles",
    "yaml.load": "constructs objects",
    "yaml.unsafe_load": "constructs objects",
    "os.system": "starts a shell",
    "os.popen": "starts a shell",
    "tempfile.mktemp": "names a file that another may make first",
}
MODULES = {
    "socket": "opens connections",
    "urllib.request": "opens connections",
    "http.client": "opens connections",
    "requests": "opens connections",
    "httpx": "opens connections",
    "ftplib": "opens connections",
    "smtplib": "opens connections",
}


def faults(text: str) -> list[str]:
    """`line: what` for each thing in this source that is not allowed."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: {MODULES[alias.name]}" for alias in node.names if alias.name in MODULES]
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found.append(f"{node.lineno}: {MODULES[node.module]}")
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in CALLS:
            found.append(f"{node.lineno}: {CALLS[name]}")
        words = {word.arg: word.value for word in node.keywords}
        if name == "torch.load" and ast.unparse(words.get("weights_only", ast.Constant(False))) != "True":
            found.append(f"{node.lineno}: unpickles")
        if name.startswith("subprocess.") and ast.unparse(words.get("shell", ast.Constant(False))) != "False":
            found.append(f"{node.lineno}: starts a shell")
    return found


@pytest.mark.parametrize("path", sorted(ADVISOR.rglob("*.py")), ids=lambda path: str(path.relative_to(ADVISOR)))
def test_source_is_safe(path: Path) -> None:
    assert not faults(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "eval(text)",
        "exec(compile(text, '', 'exec'))",
        "import pickle\npickle.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(words, shell=True)",
        "subprocess.Popen(words, shell=flag)",
        "import socket",
        "from urllib.request import urlopen",
        "yaml.load(text, Loader=yaml.Loader)",
    ],
)
def test_each_is_seen(text: str) -> None:
    assert faults(text)


def test_what_is_allowed_is_not_refused() -> None:
    assert not faults(
        "torch.load(path, weights_only=True)\nsubprocess.run(words, shell=False)\nmodel.eval()\nyaml.safe_load(t)"
    )
