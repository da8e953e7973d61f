"""Loaded by Python itself at the start of the user's script, through PYTHONPATH: attaches advisor once torch or CuPy is there.

This file runs in every Python process below the supervisor, so it imports nothing but what the interpreter has loaded
already. It does nothing where it is not wanted (DataLoader workers, helper processes), and no fault of its own reaches
the user. In a search every Python process sets aside what it is about to change, and the script does not start when
it cannot.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))  # the folder of the advisor package
# What a multiprocessing helper runs with `-c`: it is a worker of a process that is attached already.
_HELPERS = ("multiprocessing.spawn", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
# Programs, and modules run with `-m`, that start training processes and do not train themselves.
_AGENTS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "accelerate.commands.launch"),
    *("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch", "pip", "uv", "advisor.distributed.agent"),
)

_ME = str(os.getpid())  # kept by a script that replaces itself (`os.execv`), which then is still the one that trains
_standby = os.environ.pop("ADVISOR_STANDBY", "")  # what relay.py has set: a handle, and modules
_guard: Any = None  # of the script's files, in a search


def _say(text: str) -> None:
    try:  # noqa: SIM105 – contextlib would have to be imported
        sys.stderr.write(f"[advisor] {text}\n")
    except Exception:
        pass


def _tell(event: str, error: str = "") -> None:
    """One line to the supervisor, as loop/session.py's `tell` writes it: that may be what cannot be imported here."""
    try:
        import time

        line = f'"t": {time.time()!r}, "event": "{event}"'
        if error:
            from json import dumps

            line += f', "error": {dumps(error)}'
        path = os.path.join(os.path.dirname(os.environ["ADVISOR_SESSION"]), "progress.jsonl")
        with open(path, "a", encoding="utf-8") as stream:
            stream.write("{" + line + "}\n")
    except Exception:
        pass


def _switched_off(why: str) -> None:
    """Nothing will be measured in this process. The supervisor ends it where nobody wants its training."""
    _say(f"switched off, the script goes on: {why}")
    _tell("fault", why)


def _step_aside() -> None:
    """Take this folder off the import path and run the user's own sitecustomize, as if this one were not there."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    own = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401 – the user's, which runs
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        # The import system expects to find the module it is loading.
        if own is not None:
            sys.modules.setdefault("sitecustomize", own)


def _wanted() -> bool:
    """Whether this process is the one that trains, or one of its ranks."""
    if not os.environ.get("ADVISOR_SESSION") or _disabled():
        return False
    if os.environ.get("ADVISOR_ATTACHED", _ME) != _ME:
        return False  # a subprocess of the script: a compile worker, a tool; or a rank, which shows later
    way, started = _started(sys.orig_argv)
    if "--multiprocessing-fork" in sys.orig_argv or (way == "c" and any(helper in started for helper in _HELPERS)):
        return False
    if "LOCAL_RANK" in os.environ:
        return True
    if way != "c" and os.path.basename(started) in _AGENTS:
        os.environ["ADVISOR_SUPERVISOR"] = "0"  # what trains is below it
        return False
    supervisor = os.environ.get("ADVISOR_SUPERVISOR", "")
    return supervisor == "0" or supervisor == str(os.getppid())


def _started(words: list[str]) -> tuple[str, str]:
    """What Python runs: ("", script), ("m", module) or ("c", code; none of a terminal). What stands behind it are its own words, whatever
    they say.
    """
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-") or word == "-":
            return "", word
        for at, letter in enumerate(word[1:], 2):
            if letter in "mc":
                return letter, word[at:] or next(rest, "")
            if letter in "XW":  # the rest of the word is its value, or the next one is
                if not word[at:]:
                    next(rest, "")
                break
            if letter == "-":
                break
    return "c", ""


def _mark() -> None:
    """What this process starts from here on is part of its training."""
    os.environ["ADVISOR_ATTACHED"] = _ME


def _may_be_rank() -> bool:
    """Whether this is a process of a script that is observed, of which only time can tell if it trains."""
    return bool(os.environ.get("ADVISOR_SESSION")) and "ADVISOR_ATTACHED" in os.environ and not _disabled()


def _disabled() -> bool:
    return os.environ.get("ADVISOR_DISABLE", "") not in ("", "0")


class _After:
    """A finder that finds nothing itself: it sees to it that `then` runs right after the own body of the module `wanted`."""

    def __init__(self, wanted: str, then: Any) -> None:
        self._wanted, self._then = wanted, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._wanted:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: Any) -> None:
        # On this loader object only: the module's `__loader__` stays what it always is.
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            execute(module)
            if "exec_module" in vars(loader):
                del loader.exec_module
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then()

        try:
            loader.exec_module = exec_module
        except AttributeError:
            if self._wanted == "torch":
                _switched_off("torch is loaded in a way that leaves no room for hooks")


def _await_group(attached: int = 0) -> None:
    """Attach once a process joins a process group: it is a rank that the script has started itself (`mp.spawn`, Lightning).

    In process `attached` that has been done already; what it forks is waited for.
    """
    distributed: Any = getattr(sys.modules["torch"], "distributed", None)
    plain = getattr(distributed, "init_process_group", None)
    if plain is None:
        return

    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if os.getpid() != attached and vars(distributed).get("init_process_group") is init_process_group:
            distributed.init_process_group = plain
            _attach("attach", rank=True)
        return result

    init_process_group.__doc__ = plain.__doc__
    distributed.init_process_group = init_process_group


def _attach_here() -> None:
    _mark()
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not isinstance(finder, _After)
    ]  # CuPy is nothing to wait by now
    _take_orders(ahead=True)
    _attach("attach")
    _await_group(os.getpid())


def _attach_to_cupy() -> None:
    """CuPy is there, and no torch: the loop may be CuPy's. Should torch come, its steps count where they come first."""
    _tell("imported")
    _mark()
    _take_orders(ahead=False)  # what would be imported ahead needs torch
    _attach("attach_to_cupy")


def _take_orders(*, ahead: bool) -> None:
    global _standby
    if _standby:
        handle, *modules = _standby.split(",")
        _standby = ""
        _wait_for_orders(int(handle), modules if ahead else [])
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Quiet)]


def _wait_for_orders(handle: int, modules: list[str]) -> None:
    """Started ahead of its orders (relay.py), this process imports what it will need, and waits until they lie ready."""
    from importlib import import_module

    try:
        _make_importable()
        for name in modules:
            import_module(name)
    except Exception:
        pass  # whoever needs it will say so
    if _holds_gpu():
        os._exit(75)  # a choice that the script has yet to make, of the GPU, would come too late
    orders = b""
    while not orders.endswith(b"\n"):
        part = os.read(handle, 4096)
        if not part:
            os._exit(0)  # whoever would have given them is gone
        orders += part
    os.close(handle)
    os.environ["ADVISOR_SESSION"] = os.fsdecode(orders[:-1])
    if _guard is not None:
        _guard.begin()


def _holds_gpu() -> bool:
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("/dev/nvidia"):
                return True
        except OSError:  # the handle that the list was read from
            pass
    return False


class _Quiet:
    """A finder that finds nothing: while another process times its steps, no further module is imported."""

    def __init__(self, handle: int) -> None:
        from select import select

        self._select, self._handle = select, handle
        self._timing = os.path.join(os.environ.get("ADVISOR_FILES", ""), "timing")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        # Until orders come, or whoever would give them is gone.
        while os.path.exists(self._timing) and not self._select([self._handle], [], [], 0.02)[0]:
            pass


def _attach(how: str, *, rank: bool = False) -> None:
    """Hand over to advisor proper, to this function of its pipeline. A rank of the script's own is measured or trains with the plan; searched
    in is only one that is alone.
    """
    try:
        _make_importable()
        from advisor.loop.session import from_environment

        session = from_environment()
        if session is not None and not (rank and session.mode == "search" and _ranks() > 1):
            from importlib import import_module

            getattr(import_module("advisor.pipeline"), how)(session)
    except Exception as error:
        _switched_off(f"{type(error).__name__}: {error}")


def _take_place() -> None:
    """Of the ranks that `--gpus N` has started: this one's GPU, console and files."""
    if (
        "ADVISOR_GPUS" in os.environ
        and not _disabled()
        and ("LOCAL_RANK" in os.environ or "ADVISOR_RANK" in os.environ)
    ):
        _make_importable()
        from importlib import import_module

        import_module("advisor.distributed.place").take()


def _ranks() -> int:
    """How many processes train together."""
    distributed: Any = getattr(sys.modules["torch"], "distributed", None)
    return int(distributed.get_world_size()) if distributed.is_initialized() else 1


def _guard_files() -> None:
    """In a search: from here on, before torch or anything else of the script's is imported, its files are set aside."""
    global _guard
    folder = os.environ.get("ADVISOR_FILES")
    if not folder or _disabled():
        return
    # The script's own folder is not on the path yet: a module named advisor there would be found too late.
    way, started = _started(sys.orig_argv)
    base = os.getcwd() if way else os.path.dirname(os.path.realpath(started))
    for own in (os.path.join(base, "advisor.py"), os.path.join(base, "advisor", "__init__.py")):
        if os.path.isfile(own) and os.path.dirname(os.path.realpath(own)) != os.path.realpath(_PACKAGE):
            raise ImportError(f"the script has a module named advisor of its own ({own})")
    _make_importable()
    from importlib import import_module
    from pathlib import Path

    _guard = import_module("advisor.userfiles.guard").Guard.of(Path(folder), waits=bool(_standby))


def _make_importable() -> None:
    """`import advisor` finds the advisor that started this process, without a change to the user's sys.path.

    Raises:
        ImportError: when the script has a module of that name itself: the script goes first.
    """
    from importlib import util

    loaded = sys.modules.get("advisor")
    spec = getattr(loaded, "__spec__", None) if loaded is not None else util.find_spec("advisor")
    if spec is None:
        sys.meta_path.append(_OwnPackage())
        return
    origin = os.path.dirname(os.path.realpath(spec.origin or ""))
    if origin != os.path.realpath(_PACKAGE):
        raise ImportError(f"the script has a module named advisor of its own ({spec.origin})")


class _OwnPackage:
    """Finds the advisor package, and only that, where nothing else does."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "advisor":
            return None
        from importlib import util

        return util.spec_from_file_location(
            "advisor", os.path.join(_PACKAGE, "__init__.py"), submodule_search_locations=[_PACKAGE]
        )


try:
    _step_aside()
finally:  # a fault in the user's own sitecustomize is shown by Python, as ever
    try:
        _trains = _wanted()
        if _standby and not _trains:
            os._exit(75)  # it would not wait
        try:
            _guard_files()
            _take_place()
        except Exception as _error:
            if _trains:
                _why = f"the script is not started, its files could not be set aside: {type(_error).__name__}: {_error}"
                _say(_why)
                _tell("fault", _why)
                os._exit(3)  # an exception would be shown as a fault of Python's start
            _say(f"files are not set aside in process {os.getpid()}: {type(_error).__name__}: {_error}")
        if _trains:
            # Of a command (`conda run`, `pipenv run`) any descendant may train: the one that imports torch.
            if os.environ.get("ADVISOR_SUPERVISOR") != "0" or "LOCAL_RANK" in os.environ:
                _mark()
            if _standby:
                sys.meta_path.insert(0, _Quiet(int(_standby.split(",")[0])))
            else:
                _tell("started")
            if "torch" in sys.modules:
                _attach_here()
            else:
                sys.meta_path.insert(0, _After("cupy", _attach_to_cupy))
                sys.meta_path.insert(0, _After("torch", _attach_here))
        elif _may_be_rank() and "torch" not in sys.modules:
            sys.meta_path.insert(0, _After("torch", _await_group))
    except Exception as _error:
        _switched_off(f"{type(_error).__name__}: {_error}")
