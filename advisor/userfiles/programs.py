"""Which files a program that a script starts may change, from its command line alone: `rm -rf out`, `cp a b`, `date >> log`.

Python processes set files aside for themselves (`guard.Guard`); a shell and what it calls cannot be watched, so what their
words name is set aside before they start. What a program writes under names of its own choice is not found this way.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from advisor.resources import BOOTSTRAP

# Programs that change whole folders named to them; others (`du`, `ls`, `git -C`) are taken to read them.
_CHANGE_FOLDERS = frozenset({"rm", "rmdir", "mv", "cp", "rsync", "find", "shred", "sed"})
# And programs that make files under bare names; of others' words only what looks like a file name is taken for one.
_MAKE = _CHANGE_FOLDERS | {"mkdir", "touch", "tee", "ln", "tar", "zip", "unzip", "gzip", "dd"}
# Of the system and of installed packages: no training script's results lie there.
_INSTALLED = ("/bin/", "/sbin/", "/lib/", "/lib64/", "/usr/", "/opt/", "/etc/", "/boot/", "/snap/")
# Compilers and what asks the machine about itself, as torch, Triton and loggers start them.
_COMPILERS = frozenset({"cc", "c++", "gcc", "g++", "clang", "clang++", "nvcc", "ptxas", "ld", "ninja"})
_ASKERS = frozenset({"uname", "hostname", "which", "nvidia-smi", "lscpu", "lsb_release", "free", "ps", "id", "git"})
_HARMLESS = _COMPILERS | _ASKERS | {"ldconfig"}
_JOINTS = re.compile(r"[;&|<>()`,]+|\$\(")


def named(executable: object, arguments: object, cwd: object = None, environment: object = None) -> Iterator[str]:
    """Paths in the words of a command, in full: existing files, folders it may change, and names of files it may make.

    Args:
        arguments: as `subprocess.Popen` takes them: words, or a shell's line.
        environment: what the program gets in place of this process's own; a Python that finds advisor's bootstrap in it
            needs no help.
    """
    words = _words(arguments)
    programs = {os.path.basename(word) for word in (_text(executable), *words)}
    first = os.path.basename(words[0]) if words else ""
    if first in _HARMLESS or _guards_itself(words, environment):
        return
    changes_folders, makes = bool(programs & _CHANGE_FOLDERS), bool(programs & _MAKE)
    base = _text(cwd) or os.getcwd()
    for word in dict.fromkeys(words[1:] if not isinstance(arguments, (str, bytes)) else words):
        option, _, value = word.partition("=")  # --out=log.txt, of=log.txt
        name = value if word.startswith("-") or (option.isidentifier() and value) else word
        for path in _found(base, name):
            if path.startswith((*_INSTALLED, os.path.join(sys.prefix, ""), os.path.join(sys.base_prefix, ""))):
                continue
            if not os.path.lexists(path):
                like_a_file = (makes and name not in _MAKE) or "." in os.path.basename(path) or "/" in name
                if like_a_file and os.path.isdir(os.path.dirname(path)):
                    yield path
            elif changes_folders or not os.path.isdir(path):
                yield path


def takes_away(executable: object, arguments: object) -> bool:
    """Whether the command removes what its words name, or moves it away."""
    words = (_text(executable), *_words(arguments))
    return not {"rm", "mv", "shred"}.isdisjoint(map(os.path.basename, words))


def _words(arguments: object) -> list[str]:
    """The words of a command; the line that a shell is given (`sh -c "…"`) is taken apart too."""
    if isinstance(arguments, (str, bytes, os.PathLike)):
        return _of_line(_text(arguments))
    words = [_text(a) for a in arguments] if isinstance(arguments, Sequence) else []
    if "-c" in words[:-1]:
        place = words.index("-c") + 1
        return [*words[:place], *_of_line(words[place]), *words[place + 1 :]]
    return words


def _of_line(line: str) -> list[str]:
    line = _JOINTS.sub(" ", line)
    try:
        return shlex.split(line)
    except ValueError:  # an open quotation mark
        return line.split()


def _text(value: object) -> str:
    try:
        return os.fsdecode(value)  # type: ignore[arg-type]  # a TypeError is the answer
    except TypeError:
        return ""


def _guards_itself(words: Sequence[str], environment: object) -> bool:
    if not words or not os.path.basename(words[0]).startswith("python"):
        return False
    if isinstance(environment, dict):
        environment = {_text(name): _text(value) for name, value in environment.items()}
    elif environment is None:
        environment = os.environ
    else:
        return False
    return str(BOOTSTRAP) in environment.get("PYTHONPATH", "").split(os.pathsep) and not {"-I", "-E", "-S"} & set(words)


def _found(base: str, name: str) -> list[str]:
    if not name or "\0" in name or name in (".", "..", "/"):
        return []
    path = os.path.join(base, os.path.expanduser(name))
    if any(c in name for c in "*?["):
        return glob.glob(path)
    return [os.path.abspath(path)]
