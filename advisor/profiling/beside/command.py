"""What is to be run: a script, a module, a notebook or a program, as the user wrote it. Broken ones are told before anything starts."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.core.errors import AdvisorError, ExitCode
from advisor.profiling.beside import notebooks


class BrokenScript(AdvisorError):
    """The script cannot be compiled. Its text is Python's own message, and the exit code is Python's: 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.FINDINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """What to run. `name` is the script or module as the user wrote it; `literal` says that `argv` is a command of the
    user's own (torchrun, a shell script), in which some descendant trains. `agent` starts the script as several ranks: it stands in
    the interpreter's place (distributed/starting.py)."""

    argv: tuple[str, ...]
    name: str
    arguments: tuple[str, ...] = ()
    literal: bool = False
    agent: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()  # for its environment

    @property
    def started(self) -> tuple[str, ...]:
        """The words of the process that is started."""
        return (*self.agent, *self.argv[1:]) if self.agent else self.argv

    @property
    def words(self) -> tuple[str, ...]:
        """What `parse` makes this command of again: a script, `-m` or a program first, then what follows it."""
        if self.name.endswith(notebooks.SUFFIX):  # the script was made of it
            return (self.name, *self.arguments)
        return self.argv if self.literal else self.argv[1:]

    @classmethod
    def parse(cls, words: Sequence[str], module: bool = False) -> ScriptCommand:
        """Make a command of `train.py args`, `-m pkg.mod args` (or `pkg.mod args` with `module`) or `torchrun … train.py`.

        The script is compiled, not run, so that a broken one is told at once.

        Raises:
            BrokenScript: with Python's own message, for a script with a syntax error.
            AdvisorError: when there is nothing to run, or it is missing, a folder, or unreadable.
        """
        if not module and words[:1] == ("-m",):
            words, module = words[1:], True
        if not words or not words[0]:
            raise AdvisorError("no script given", expected="a Python script, -m with a module, or a command")
        first, arguments = words[0], tuple(words[1:])
        if module:
            source = _module_file(first)
            if source is not None:
                _compile(source)
            elif not _may_be_imported(first.split(".", 1)[0]):
                raise AdvisorError(
                    f"no module {first}",
                    expected=f"a package {first.split('.', 1)[0]} below this folder, or an installed one",
                    fix="Start from the folder from which `python -m` finds it.",
                )
            return cls(argv=(sys.executable, "-m", first, *arguments), name=first, arguments=arguments)
        path = Path(first)
        if path.suffix == notebooks.SUFFIX:
            made = notebooks.as_script(path)
            _compile(made)
            return cls(argv=(sys.executable, str(made), *arguments), name=first, arguments=arguments)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise AdvisorError(f"{first} is a folder", expected="a Python script", fix=_scripts_in(path))
        # A program of Python's (torchrun) has an interpreter of its own, so it is run as it is.
        if is_script(path) or path.is_dir() or (_is_python(path) and shutil.which(first) is None):
            if not path.exists():
                raise AdvisorError(f"no script {first}", expected="a file that exists", fix=_nearest(path))
            _compile(path / "__main__.py" if path.is_dir() else path)
            return cls(argv=(sys.executable, first, *arguments), name=first, arguments=arguments)
        if first == "last":  # a program of that name is on most machines, and lists who was logged in
            raise AdvisorError(
                "`last` names a run, and this command starts a script",
                expected="a Python script",
                fix=_scripts_in(Path()).replace("It holds", "Here are"),
            )
        # As the shell finds it, else beside the interpreter: an environment that is not activated has its torchrun there.
        found = shutil.which(first)
        program = found or shutil.which(first, path=str(Path(sys.executable).parent))
        if program is None:
            raise AdvisorError(
                f"neither a script nor a command: {first}", expected="a Python script or a program", fix=_nearest(path)
            )
        refused = _isolating(Path(program), arguments)
        if refused:
            raise AdvisorError(
                f"{first} {refused} keeps advisor out of the script",
                expected="an interpreter that reads PYTHONPATH and runs sitecustomize",
                fix=f"Leave {refused} away while measuring.",
            )
        argv = (first if found else program, *arguments)
        return cls(argv=argv, name=script_name((first, *arguments)), arguments=arguments, literal=True)


def script_name(words: Sequence[str]) -> str:
    """The script or module in the words of a command, or the program where it names neither."""
    first, *arguments = words
    if first == "-m" and arguments:
        return arguments[0]
    if is_script(Path(first)):
        return first
    return next((word for word in arguments if word.endswith(".py")), first)


def is_script(path: Path) -> bool:
    """Whether it is named as Python's source files are."""
    return path.suffix.lower() in (".py", ".pyw")


def _isolating(program: Path, arguments: Sequence[str]) -> str:
    """The interpreter's option that makes it pass over what attaches advisor (-I, -E, -S), or nothing."""
    if not re.fullmatch(r"(python|pypy)[\d.]*", program.name):
        return ""
    words = iter(arguments)
    for word in words:
        if not re.fullmatch(r"-[a-zA-Z]+", word) or word[1] in "cm":
            return ""
        if word in ("-W", "-X"):
            next(words, None)
        elif word[1] not in "WX" and set(word) & set("IES"):
            return word
    return ""


def _compile(path: Path) -> None:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise AdvisorError(f"{path} cannot be read ({error.strerror})", expected="a readable script") from None
    if source[:4] == b"PK\x03\x04":
        return  # a zip application
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script will show its own
        try:
            compile(source, str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            told = "".join(traceback.format_exception_only(type(error), error)).rstrip()
            raise BrokenScript(told if getattr(error, "filename", None) else f"{path}: {told}") from None


def _module_file(name: str) -> Path | None:
    """The file that `-m name` would run, when it lies below the working directory; else Python itself shall say."""
    base = Path(*name.split("."))
    for candidate in (base / "__main__.py", base.with_suffix(".py") if base.suffix == "" else base):
        if candidate.is_file():
            return candidate
    return None


def _may_be_imported(package: str) -> bool:
    """Whether Python finds this package or module from the working directory. Nothing is imported."""
    try:
        found = importlib.util.find_spec(package)
        return (found or importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])) is not None
    except (ImportError, ValueError, AttributeError):
        return True  # Python itself shall say


def _is_python(path: Path) -> bool:
    """A file without suffix that says it is Python's in its first line."""
    try:
        with open(path, "rb") as stream:
            line = stream.readline(200)
    except OSError:
        return False
    return line.startswith(b"#!") and b"python" in line


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in (path.parent if path.parent.name else Path()).iterdir()]
    except OSError:
        return f"There is no folder {path.parent}."
    near = difflib.get_close_matches(path.name, [name for name in names if name.endswith(".py")], n=1, cutoff=0.5)
    return f"Did you mean {path.with_name(near[0])}?" if near else ""


def _scripts_in(path: Path) -> str:
    names = sorted(entry.name for entry in path.glob("*.py"))[:3]
    return f"It holds {', '.join(names)}." if names else ""
