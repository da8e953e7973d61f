"""A copy of the user's project with a patch applied: Python files are copied, all else is linked to where it lies.

The patch is applied to the copy by `git apply` (or `patch`), so the user's own files stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.units import bytes_text

COPIED = (".py", ".pyi")
# Never part of a project's source; not even linked, since what runs in the copy would find them there.
PASSED_OVER = frozenset({".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "advisor-runs"})
# Of a folder that are looked through for Python files; with more it is data, and linked as a whole.
MOST_ENTRIES = 20_000
MOST_BYTES = 10_000_000  # of a patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shadow:
    """The patched copy of `root` in `folder`; `files` are the paths that the patch changes, from `root`."""

    root: Path
    folder: Path
    files: tuple[str, ...]

    def directory(self) -> Path:
        """The counterpart of the working directory, or that itself where it lies outside the project."""
        return self.inside(Path.cwd()) or Path.cwd()

    def words(self, words: Sequence[str]) -> tuple[str, ...]:
        """A command with the paths that name something of the project led into the copy; relative ones lead there by themselves."""
        moved = self.directory() != Path.cwd()
        return tuple(self._word(word, moved) for word in words)

    def python_path(self) -> str:
        """Folders that hold the patched files' packages, to go before where an editable installation leads."""
        found = []
        for name in self.files:
            folder = (self.folder / name).parent
            while (folder / "__init__.py").exists() and folder != self.folder:
                folder = folder.parent
            found.append(str(folder))
        return os.pathsep.join(dict.fromkeys(found))

    def paths(self) -> tuple[str, ...]:
        """The patched Python files, where they lie in the copy."""
        return tuple(str(self.folder / name) for name in self.files if name.endswith(COPIED))

    def inside(self, path: Path) -> Path | None:
        """Where something of the project lies in the copy; None for what is not of the project."""
        try:
            return self.folder / path.resolve().relative_to(self.root)
        except ValueError:
            return None

    def _word(self, word: str, moved: bool) -> str:
        path = Path(word)
        if not word or word.startswith("-") or (moved and not path.is_absolute()) or not path.exists():
            return word
        return str(self.inside(path) or word)


def make(patch: Path, folder: Path, script: str) -> Shadow:
    """Copy the project that the patch fits to `folder`, and apply the patch there.

    The project's root is the first of these that has the files the patch changes: the working directory, the top of its git
    checkout, the script's own folder.

    Raises:
        AdvisorError: for a patch that cannot be read, changes nothing, fits nowhere, or cannot be applied.
    """
    text = _read(patch)
    roots = _roots(script)
    for strip in (1, 0):
        changed = _changed(text, strip)
        for root in roots if changed else ():
            if all((root / name).is_file() for name in changed):
                _copy(root, folder, changed)
                _apply(patch, text, folder, strip)
                return Shadow(root=root, folder=folder, files=changed)
    named = ", ".join(_changed(text, 1)[:3])
    if not named:
        raise AdvisorError(f"{patch} changes no file that is there", expected="a unified diff, as `git diff` writes it")
    looked = ", ".join(str(root) for root in roots)
    raise AdvisorError(f"{patch} changes {named}, which is not in {looked}", fix="Run this where the patch applies.")


def _read(patch: Path) -> str:
    try:
        if patch.stat().st_size > MOST_BYTES:
            raise AdvisorError(
                f"{patch} has {bytes_text(patch.stat().st_size)}",
                expected=f"a patch of at most {bytes_text(MOST_BYTES)}",
            )
        return patch.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise AdvisorError(f"{patch} cannot be read ({why})", expected="a unified diff") from None


def _roots(script: str) -> list[Path]:
    cwd = Path.cwd().resolve()
    top = next((folder for folder in (cwd, *cwd.parents) if (folder / ".git").exists()), cwd)
    beside = Path(script).resolve().parent if Path(script).is_file() else cwd
    return list(dict.fromkeys((cwd, top, beside)))


def _changed(text: str, strip: int) -> tuple[str, ...]:
    """The files that exist before the patch, and it changes; with `strip` leading folders taken off."""
    names = []
    for line in text.splitlines():
        if line.startswith("--- "):
            name = line[4:].split("\t")[0].strip()
            parts = name.split("/")
            if name != "/dev/null" and len(parts) > strip:
                names.append("/".join(parts[strip:]))
    outside = [name for name in names if name.startswith("/") or ".." in name.split("/")]
    if outside:
        raise AdvisorError(f"the patch changes {outside[0]}", expected="paths inside the project")
    return tuple(dict.fromkeys(names))


def _copy(root: Path, folder: Path, changed: Sequence[str]) -> None:
    """`root` below `folder`: Python files and those that change as copies, folders without any as links."""
    real = {(root / name).parent for name in changed}
    real |= {above for path in real for above in path.parents}

    def lay(source: Path, target: Path) -> None:
        target.mkdir(parents=True)
        for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.name in PASSED_OVER or path == folder or path in folder.parents:
                continue
            name = path.relative_to(root).as_posix()
            if entry.is_dir(follow_symlinks=False) and (path in real or _has_python(path)):
                lay(path, target / entry.name)
            elif entry.is_file() and (name in changed or entry.name.endswith(COPIED)):
                shutil.copy2(path, target / entry.name)
            else:
                (target / entry.name).symlink_to(path)

    try:
        lay(root, folder)
    except OSError as error:
        raise AdvisorError(f"{root} cannot be copied to {folder} ({error.strerror})") from None


def _has_python(folder: Path) -> bool:
    seen = 0
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in PASSED_OVER]
        if any(name.endswith(COPIED) for name in files):
            return True
        seen += len(files) + len(folders)
        if seen > MOST_ENTRIES:
            return False
    return False


def _apply(patch: Path, text: str, folder: Path, strip: int) -> None:
    """By git where it is there, else by patch.

    Raises:
        AdvisorError: where neither is, or the patch does not fit.
    """
    git, program = shutil.which("git"), shutil.which("patch")
    if git:
        # Not as a part of a checkout that the copy may lie in: there git passes over what is ignored.
        words = [git, "apply", f"-p{strip}", "--recount", "--whitespace=nowarn", "-"]
        variables = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    elif program:
        words, variables = [program, f"-p{strip}", "--forward", "--batch", "--silent"], dict(os.environ)
    else:
        raise AdvisorError("neither git nor patch is installed", fix="Install one of them: it applies the patch.")
    done = subprocess.run(words, cwd=folder, env=variables, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise AdvisorError(
            f"{patch} does not apply ({said[0].removeprefix('error: ') if said else 'no reason given'})",
            fix="Make it from the files as they are now: git diff > FILE.",
        )
