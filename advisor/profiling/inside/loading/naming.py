"""What a loader's stack is at work on: reading, decoding, augmenting, collating; under which line, and by what name.

A sample is told by its innermost frame that has a name known here, as libraries call each other (a crop that resizes, a convert that
decodes a file first). Functions of C extensions have no frame: then the call that the line is in tells, by its place in the source.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from advisor.core.loading import COLLATE, COLOUR, CROP, DECODE, FLIP, HAND_OVER, OTHER, READ, RESIZE, TO_FP32
from advisor.loop.sources import LIBRARY, USER, Lines

# Names of functions and classes, in lower case, by the work that they do. A name matches whole, or as the end of a class's
# ("RandomHorizontalFlip"). Of torchvision, PIL, OpenCV, albumentations, kornia, imageio, scikit-image, NumPy and torch.
_NAMES: dict[str, str] = {
    DECODE: """
        imread imdecode decode_image decode_jpeg decode_png read_image pil_loader accimage_loader default_loader mimread
        videoreader get_batch read_video decode loadimage dcmread get_fdata frombuffer frombytes""",
    READ: """
        open read readline readlines load memmap fromfile get_object read_bytes read_text loadtxt read_csv genfromtxt
        loads read_file read_parquet""",
    RESIZE: """
        resize randomresizedcrop thumbnail interpolate smallestmaxsize longestmaxsize zoom rescale resized_crop scale
        randomscale resizedcrop reduce""",
    FLIP: "flip hflip vflip fliplr flipud randomflip rot90 horizontalflip verticalflip mirror",
    CROP: """
        crop randomcrop centercrop center_crop pad padifneeded fivecrop tencrop cutout randomerasing erase coarsedropout
        randomrotation rotate randomaffine affine warpaffine elastictransform randomperspective perspective
        shiftscalerotate gridmask""",
    COLOUR: """
        colorjitter adjust_brightness adjust_contrast adjust_saturation adjust_hue cvtcolor randomgrayscale grayscale
        gaussianblur gaussian_blur blur equalize autocontrast posterize solarize huesaturationvalue clahe autoaugment
        randombrightnesscontrast randaugment trivialaugmentwide augmix gaussnoise brightness contrast enhance sharpness
        adjust_sharpness medianblur""",
    TO_FP32: """
        totensor totensorv2 to_tensor pil_to_tensor piltotensor toimage to_image normalize normalise convertimagedtype
        convert_image_dtype todtype to_dtype astype float from_numpy as_tensor tensor float32 asarray true_divide div div_
        sub_ permute transpose ascontiguousarray img_as_float array""",
    COLLATE: "default_collate collate collate_fn fast_collate stack cat pad_sequence collate_tensor_fn concatenate",
}
_WORK = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Names that mean their work only as methods of a class, or in a file, of these: PIL loads a file when its pixels are first asked for.
_FILES: tuple[tuple[str, str, str], ...] = (
    ("ImageFile.py", "load", DECODE),
    ("Image.py", "convert", DECODE),
    ("Image.py", "open", READ),
    ("Image.py", "transpose", FLIP),
    ("Image.py", "__array_interface__", TO_FP32),
    ("Image.py", "tobytes", TO_FP32),
    ("collate.py", "", COLLATE),
    ("reductions.py", "", HAND_OVER),
)
_FETCH, _FEEDER = "fetch.py", "queues.py"
_CALLS = frozenset({"__call__", "forward", "transform", "apply", "_call_impl", "_wrapped_call_impl", "encodes"})
_ARITHMETIC = (ast.Mult, ast.Div, ast.Sub, ast.Add)


@dataclass(frozen=True, slots=True)
class NamedWork:
    """What a sample is told as."""

    kind: str
    source: str
    what: str


@dataclass(frozen=True, slots=True)
class _Frame:
    whose: str
    path: str  # with its line
    name: str  # of the class whose call it is, else of the function
    is_class: bool
    by_file: str


class Naming:
    """Names samples; remembers the calls of lines, so that a sample costs a walk up its frames."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._calls: dict[tuple[CodeType, int], str] = {}

    def of(self, frame: FrameType | None) -> NamedWork | None:
        """What `frame`, the innermost of a stack, is at work on; None outside of a DataLoader's fetch."""
        frames: list[FrameType] = []
        for each in outwards(frame):
            if _base(each.f_code.co_filename) == _FETCH and each.f_code.co_name == "fetch":
                return self._told(frames, collating=self._call(each) == "collate_fn")
            frames.append(each)
        return None

    def anywhere(self, frame: FrameType | None) -> NamedWork | None:
        """The same of any stack; None where none of the user's code is in it, or nothing but its loop."""
        frames = list(outwards(frame))
        users = [at for at, each in enumerate(frames) if self.whose(each) == USER]
        # From the innermost to the user's innermost function, and the classes around it whose calls they are.
        return self._told(frames[: users[0] + 1]) if users else None

    def whose(self, frame: FrameType) -> str:
        """Whose code it is: as sources.py has it."""
        return self._lines.whose(frame.f_code.co_filename)[0]

    def _told(self, stack: Sequence[FrameType], *, collating: bool = False) -> NamedWork:
        """Innermost first: reading and decoding are told wherever they come to pass; else the outermost name of a library's, or of a
        class of the script's, as a crop resizes and a blend adds; else the call in the user's line."""
        frames = [self._frame(each) for each in stack]
        # The call of the user's innermost line.
        said = next((self._call(each) for each, known in zip(stack, frames, strict=True) if known.whose == USER), "")
        users = [frame for frame in frames if frame.whose == USER]
        others = [frame for frame in frames if frame.whose == LIBRARY]
        source = (users[0] if users else others[-1] if others else frames[-1]).path if frames else ""
        if collating:
            return NamedWork(COLLATE, source if users else "", users[-1].name if users else "default_collate")
        for frame in frames:
            if frame.whose == USER and not frame.is_class:
                break
            kind = frame.by_file or _by_name(frame.name)
            if kind in (READ, DECODE):
                return NamedWork(kind, source, frame.name)
        if said and _by_name(said) in (READ, DECODE):
            return NamedWork(_by_name(said), source, said)
        for frame in reversed(frames):
            if (frame.whose == LIBRARY or frame.is_class) and _by_name(frame.name):
                return NamedWork(_by_name(frame.name), source, frame.name)
        by_file = next((frame for frame in frames if frame.by_file), None)
        if by_file is not None:
            return NamedWork(by_file.by_file, source, by_file.name)
        if _by_name(said):
            return NamedWork(_by_name(said), source, said)
        inner = users[0].name if users else ""
        return NamedWork(_by_name(inner) or OTHER, source, said or inner)

    def _frame(self, frame: FrameType) -> _Frame:
        code = frame.f_code
        whose, path = self._lines.whose(code.co_filename)
        name, is_class = _name(frame)
        return _Frame(
            whose, f"{path}:{frame.f_lineno}", name, is_class, _by_file(_base(code.co_filename), code.co_name)
        )

    def _call(self, frame: FrameType) -> str:
        """The function that the frame's line calls, as the source names it: `imread` of `cv2.imread(path)`; "" where it is no call."""
        key = frame.f_code, frame.f_lasti
        if key not in self._calls:
            self._calls[key] = _called(frame)
        return self._calls[key]


def handing_over(frame: FrameType | None) -> bool:
    """Whether the thread that feeds a worker's queue is at work, rather than waiting for a batch."""
    inner = frame.f_code.co_name if frame is not None else ""
    frames = {(_base(each.f_code.co_filename), each.f_code.co_name) for each in outwards(frame)}
    return (_FEEDER, "_feed") in frames and inner not in ("wait", "_feed", "acquire", "__enter__")


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A stack's frames, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _base(path: str) -> str:
    return os.path.basename(path)


def _name(frame: FrameType) -> tuple[str, bool]:
    """The class whose call a frame is ("RandomCrop" of its `forward`), and True; else its function's name."""
    code = frame.f_code
    if code.co_name in _CALLS:
        owner: Any = frame.f_locals.get("self")
        return (type(owner).__name__, True) if owner is not None else ("", False)
    return code.co_name, False


def _by_file(file: str, function: str) -> str:
    for ending, name, kind in _FILES:
        if file == ending and name in ("", function):
            return kind
    return ""


def _by_name(name: str) -> str:
    """The work that a name stands for; "" for one that is not known."""
    plain = name.lower().removeprefix("_")
    if plain in _WORK:
        return _WORK[plain]
    if name[:1].isupper():  # a class of the script's, or a library's with a prefix: RandomHorizontalFlip, MyColorJitter
        parts = re.findall(r"[A-Z][a-z0-9]*", name)
        for first in range(1, len(parts)):
            kind = _WORK.get("".join(parts[first:]).lower())
            if kind:
                return kind
    return ""


def _called(frame: FrameType) -> str:
    text = _expression(frame)
    try:
        node: ast.AST = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        found = re.findall(r"([A-Za-z_]\w*)\s*\(", text)
        return next((name for name in found if _by_name(name)), found[0] if found else "")
    if isinstance(node, ast.Call):
        called = node.func
        return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        return "float32" if _with_fraction(node) else ""
    return ""


def _with_fraction(node: ast.BinOp) -> bool:
    """Arithmetic with 255 or a fraction: pixels that become floating-point."""
    return any(
        isinstance(part, ast.Constant) and (part.value == 255 or isinstance(part.value, float))
        for part in ast.walk(node)
    )


def _expression(frame: FrameType) -> str:
    """The source of the call that the frame is in, where Python tells its place (3.11); else of its line."""
    code, line = frame.f_code, frame.f_lineno
    if sys.version_info >= (3, 11):
        positions = list(code.co_positions())
        at = frame.f_lasti // 2
        if at < len(positions):
            first, last, begin, end = positions[at]
            if first is not None and last is not None and begin is not None and end is not None:
                rows = [linecache.getline(code.co_filename, row) for row in range(first, last + 1)]
                if len(rows) == 1:
                    return rows[0].encode()[begin:end].decode(errors="replace")
                rows[0], rows[-1] = (
                    rows[0].encode()[begin:].decode(errors="replace"),
                    rows[-1].encode()[:end].decode(errors="replace"),
                )
                return "".join(rows)
    return linecache.getline(code.co_filename, line)
