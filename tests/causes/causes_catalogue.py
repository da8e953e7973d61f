"""Small trainings with one planted cause each: which rule must lead the first or the second card of their report.

A training is one of three loop styles (styles/) with a fault written into its slots (`#: name`). Names, lines and the loop differ
from style to style; the cause is the same. Where the cure is a line of the user's, `cured` has the slots of the same training
without the fault, and `alternating` writes one that has it by turns (alternate.py): what that costs is measured so.
"""

from __future__ import annotations

import re
import textwrap
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

STYLES = Path(__file__).with_name("styles")
NAMES: Mapping[str, Mapping[str, str]] = {
    "flat": {
        "model": "net",
        "opt": "optimizer",
        "x": "data",
        "y": "target",
        "n": "done",
        "loader": "loader",
        "dev": "device",
        "s": "",
    },
    "functions": {
        "model": "model",
        "opt": "optim",
        "x": "x",
        "y": "y",
        "n": "len(history)",
        "loader": "loader",
        "dev": "device",
        "s": "arguments.",
    },
    "trainer": {
        "model": "self.network",
        "opt": "self.optimizer",
        "x": "inputs",
        "y": "wanted",
        "n": "self.iteration",
        "loader": "self.feed",
        "dev": "where",
        "s": "self.",
    },
}
SIZES = """
    width, depth, batch, side = (64, 3, 64, 64) if on_gpu else (8, 1, 8, 24)
    BIAS, norm = False, nn.BatchNorm2d
"""
PLAIN: Mapping[str, str] = {
    "sizes": SIZES,
    "optimizer": "$opt = torch.optim.SGD($model.parameters(), lr=0.01, momentum=0.9)",
    "loader": "$loader = list(zip(images.split(batch), labels.split(batch)))",
    "loss": "loss = F.cross_entropy($model($x), $y)",
    "backward": "$opt.zero_grad()\nloss.backward()",
    "update": "$opt.step()",
}
TUNED: Mapping[str, str] = {
    **PLAIN,
    "setup": "torch.backends.cudnn.benchmark = True",
    "model": "if on_gpu:\n    $model = $model.to(memory_format=torch.channels_last)",
    "optimizer": "$opt = torch.optim.SGD($model.parameters(), lr=0.01, momentum=0.9, fused=on_gpu)",
    "loss": """
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            output = $model($x.contiguous(memory_format=torch.channels_last) if on_gpu else $x)
        loss = F.cross_entropy(output.float(), $y)
    """,
}


def bf16_is_slow() -> bool:
    """Whether this processor multiplies in bf16 slower than in fp32: there are those with units for it, and those without."""
    import torch

    def fastest_s(dtype: torch.dtype) -> float:
        a = torch.ones(384, 384, dtype=dtype)
        return min(timeit.repeat(lambda: a @ a, number=1, repeat=7))

    return fastest_s(torch.bfloat16) > 1.1 * fastest_s(torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A cause: `expect` are the rules of which one must lead the first or second card; none: a sound training."""

    id: str
    expect: tuple[str, ...]
    slots: Mapping[str, str]
    styles: tuple[str, ...] = ("flat", "functions", "trainer")
    tuned: bool = True
    machines: tuple[str, ...] = ("gpu", "cpu")
    cured: Mapping[str, str] | None = (
        None  # slots without the fault: the cure is the user's, and its cost must lie in the card's interval
    )
    by_turns: Mapping[str, str] = field(
        default_factory=dict
    )  # slots of one that asks `alternate.faulty`, where those of the loop are not enough
    needs: Callable[[], bool] = lambda: True  # whether it is a fault on this machine
    after: Mapping[str, str] = field(default_factory=dict)  # text behind a slot's own, such as a line behind the update


def scripts(machine: str) -> list[tuple[str, Fault, str]]:
    """Name, fault and text of each training for this kind of machine; "-cured" is added for one without its fault."""
    made = []
    for fault in FAULTS:
        if machine not in fault.machines:
            continue
        for style in fault.styles:
            made.append((f"{fault.id}-{style}", fault, text(fault, style)))
            if fault.cured is not None:
                made.append((f"{fault.id}-{style}-cured", fault, text(fault, style, cured=True)))
    return made


def text(fault: Fault, style: str, *, cured: bool = False) -> str:
    """The training as a script."""
    return _written(_slots(fault, cured=cured), style)


def alternating(fault: Fault, style: str) -> str:
    """The training that has its fault by turns, and prints what share of a step that costs (alternate.py)."""
    ill, well = _slots(fault), _slots(fault, cured=True)
    slots = {**ill, **fault.by_turns}
    for slot in ("begin", "loss", "backward", "update", "end"):
        with_it, without = ill.get(slot, ""), well.get(slot, "")
        if slot not in fault.by_turns and with_it != without:
            slots[slot] = "if alternate.faulty:\n" + _inside(with_it) + "\nelse:\n" + _inside(without)
    slots["imports"] = "import alternate\n" + slots.get("imports", "")
    if "epoch" in fault.by_turns:
        slots["epoch"] = "alternate.boundary()\n" + textwrap.dedent(slots["epoch"]).strip("\n")
    else:
        slots["end"] = slots.get("end", "") + "\nalternate.step()"
    return _written(slots, style)


def _inside(text: str) -> str:
    return textwrap.indent(text or "pass", "    ")


def _slots(fault: Fault, *, cured: bool = False) -> dict[str, str]:
    base = TUNED if fault.tuned else PLAIN
    slots = {**base, **((fault.cured or {}) if cured else fault.slots)}
    slots = {name: textwrap.dedent(text).strip("\n") for name, text in slots.items()}
    for slot, more in ({} if cured else fault.after).items():
        slots[slot] = slots.get(slot, "") + "\n" + textwrap.dedent(more).strip("\n")
    return slots


def _written(slots: Mapping[str, str], style: str) -> str:
    lines = []
    for line in (STYLES / f"{style}.txt").read_text(encoding="utf-8").splitlines():
        mark = re.fullmatch(r"(\s*)#: (\w+)", line)
        if mark is None:
            lines.append(line)
            continue
        filled = Template(textwrap.dedent(slots.get(mark[2], "")).strip("\n")).substitute(NAMES[style])
        lines += [mark[1] + part if part else "" for part in filled.splitlines()]
    return "\n".join(lines) + "\n"


def _small(norm: str = "nn.BatchNorm2d", bias: bool = False) -> str:
    return f"""
        width, depth, batch, side = (32, 6, 16, 32) if on_gpu else (8, 1, 8, 24)
        BIAS, norm = {bias}, {norm}
    """


_AVERAGE = {"model": TUNED["model"] + "\n${s}slow = copy.deepcopy($model)"}
_LISTS = """
${{s}}averages, ${{s}}weights = (
    [t.detach() for t in net.{what} if t.is_floating_point()] for net in (${{s}}slow, $model)
)
"""
_AT_ONCE = """
with torch.no_grad():
    torch._foreach_lerp_(${s}averages, ${s}weights, 0.001)
"""
_DATASET = """
    class Pictures(torch.utils.data.Dataset):
        def __len__(self):
            return {items}

        def __getitem__(self, index):
            generator = np.random.default_rng(index)
            picture = generator.random((3, side, side), dtype=np.float32)
            until = time.perf_counter() + {seconds}
            while time.perf_counter() < until:  # decoding, which takes a core
                picture = np.flip(picture, 2).copy()
            return torch.from_numpy(picture), index % 10
"""
_ENLARGED = (
    textwrap.dedent(TUNED["loss"]) + "loss = loss + 0 * F.interpolate($x, scale_factor=2, mode='bilinear').mean()\n"
)
_TO_DEVICE = "$x, $y = $x.to($dev, non_blocking=True), $y.to($dev, non_blocking=True)"


_FRESH = "torch.utils.data.DataLoader(Pictures(), batch, num_workers=8 if on_gpu else 2, shuffle=True)"
_ONE = "torch.utils.data.DataLoader(Pictures(), batch, num_workers=1, persistent_workers=True, pin_memory=on_gpu)"
_EIGHT = "torch.utils.data.DataLoader(Pictures(), batch, num_workers=8, persistent_workers=True)"
_KEPT = _FRESH.replace("shuffle=True", "shuffle=True, persistent_workers=True")


def _loading(items: int | str, seconds: float, loader: str) -> dict[str, str]:
    """Slots of a training that reads so many pictures; `seconds` of a core's work each."""
    pictures = textwrap.dedent(_DATASET).format(items=items, seconds=seconds)
    return {
        "imports": "import numpy as np",
        "sizes": textwrap.dedent(SIZES).strip("\n") + "\n\n" + pictures,
        "loader": textwrap.dedent(loader),
        "begin": _TO_DEVICE,
    }


# The cure on a CPU: workers, and threads that leave them their cores.
_FEWER_THREADS = "on_gpu or torch.set_num_threads(max(1, torch.get_num_threads() - 2))"


def _by_epochs(items: int, seconds: float, ill: str) -> dict[str, str]:
    """Slots of one that draws an epoch from this loader and an epoch from one whose workers suffice and stay."""
    return {
        **_loading(items, seconds, f"${{s}}ill, ${{s}}well = {ill}, {_KEPT}"),
        "setup": TUNED["setup"] + "\ncores = torch.get_num_threads()",
        "epoch": """
            $loader = ${s}ill if alternate.faulty else ${s}well
            on_gpu or torch.set_num_threads(cores if alternate.faulty else max(1, cores - 2))
        """,
    }


FAULTS: tuple[Fault, ...] = (
    # --- work beside the model -------------------------------------------------------------------------------------
    Fault(
        id="average-of-parameters",
        expect=("moving-average-each-step",),
        slots={"imports": "import copy", "sizes": _small(), **_AVERAGE},
        after={
            "update": """
                with torch.no_grad():
                    for kept, new in zip(${s}slow.parameters(), $model.parameters()):
                        kept.mul_(0.999).add_(new, alpha=0.001)
            """
        },
        cured={
            "imports": "import copy",
            "sizes": _small(),
            "model": _AVERAGE["model"] + _LISTS.format(what="parameters()"),
            "update": PLAIN["update"] + _AT_ONCE,
        },
        by_turns={"model": _AVERAGE["model"] + _LISTS.format(what="parameters()")},
    ),
    Fault(
        id="average-of-state",
        expect=("moving-average-each-step",),
        slots={"imports": "import copy", "sizes": _small(), **_AVERAGE},
        styles=("functions", "trainer"),
        after={
            "end": """
                with torch.no_grad():
                    fresh = $model.state_dict()
                    for key, value in ${s}slow.state_dict().items():
                        if value.is_floating_point():
                            value.copy_(0.99 * value + 0.01 * fresh[key])
            """
        },
        cured={
            "imports": "import copy",
            "sizes": _small(),
            "model": _AVERAGE["model"] + _LISTS.format(what="state_dict().values()"),
            "end": _AT_ONCE,
        },
        by_turns={"model": _AVERAGE["model"] + _LISTS.format(what="state_dict().values()")},
    ),
    Fault(
        id="update-by-hand",
        expect=("optimizer-loops-over-tensors", "own-optimizer-loops"),
        slots={
            "sizes": _small(),
            "update": """
                with torch.no_grad():
                    for weight in $model.parameters():
                        state = ${s}memory.setdefault(weight, torch.zeros_like(weight))
                        state.mul_(0.9).add_(weight.grad)
                        weight.sub_(0.01 * state)
            """,
            "optimizer": "$opt = torch.optim.SGD($model.parameters(), lr=0.0)\n${s}memory = {}",
        },
        after={"update": "$opt.step()"},
        cured={"sizes": _small()},
        machines=("gpu",),
        by_turns={"optimizer": TUNED["optimizer"] + "\n${s}memory = {}"},
    ),
    Fault(
        id="metric-on-host",
        expect=("results-fetched-each-step", "scalar-read-each-step"),
        slots={"imports": "import numpy as np"},
        after={
            "end": """
                guess = output.detach().float().cpu().numpy()
                truth = $y.cpu().numpy()
                table = np.zeros((10, 10))
                for row, column in zip(guess.argmax(1), truth):
                    for _ in range(100):
                        table[row, column] += 1
            """
        },
        cured={},
        machines=("gpu",),
    ),
    Fault(
        id="reads-each-step",
        expect=("scalar-read-each-step", "results-fetched-each-step"),
        slots={"sizes": _small()},
        after={"end": "total = sum(value.grad.norm().item() for value in $model.parameters())"},
        cured={"sizes": _small()},
        machines=("gpu",),
    ),
    Fault(
        id="waits-each-step",
        expect=("device-synchronised",),
        slots={"sizes": _small()},
        after={
            "begin": "torch.cuda.synchronize()",
            "loss": "torch.cuda.synchronize()",
            "backward": "torch.cuda.synchronize()",
        },
        cured={"sizes": _small()},
        machines=("gpu",),
        styles=("flat", "trainer"),
    ),
    Fault(
        id="teacher-records-a-graph",
        expect=("gradients-unused",),
        slots={
            "imports": "import copy",
            "sizes": _small(),
            "model": TUNED["model"] + "\n${s}teacher = copy.deepcopy($model).eval()",
            "loss": """
                with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                    output = $model($x)
                    guide = ${s}teacher($x)
                loss = F.mse_loss(output.float(), guide.float()) + F.cross_entropy(output.float(), $y)
            """,
        },
        cured={
            "imports": "import copy",
            "sizes": _small(),
            "model": TUNED["model"] + "\n${s}teacher = copy.deepcopy($model).eval()",
            "loss": """
                with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                    output = $model($x)
                    with torch.no_grad():
                        guide = ${s}teacher($x)
                loss = F.mse_loss(output.float(), guide.float()) + F.cross_entropy(output.float(), $y)
            """,
        },
        styles=("functions", "trainer"),
    ),
    Fault(
        id="head-alone-in-optimizer",
        expect=("gradients-unused",),
        slots={
            "sizes": _small(),
            "optimizer": "$opt = torch.optim.Adam(list($model.parameters())[-2:], lr=0.001, fused=on_gpu)",
        },
        cured={
            "sizes": _small(),
            "optimizer": """
                for weight in list($model.parameters())[:-2]:
                    weight.requires_grad_(False)
                $opt = torch.optim.Adam(list($model.parameters())[-2:], lr=0.001, fused=on_gpu)
            """,
        },
        by_turns={
            "begin": """
                for weight in list($model.parameters())[:-2]:
                    weight.requires_grad_(alternate.faulty)
            """,
        },
        styles=("flat",),
    ),
    # --- switches that somebody left on -----------------------------------------------------------------------------
    Fault(
        id="anomaly-switched-on",
        expect=("anomaly-mode",),
        slots={"sizes": _small(), "setup": TUNED["setup"] + "\ntorch.autograd.set_detect_anomaly(True)"},
        cured={"sizes": _small()},
        by_turns={
            "setup": TUNED["setup"],
            "begin": "torch.autograd.set_detect_anomaly(alternate.faulty)",
        },
    ),
    Fault(
        id="anomaly-around",
        expect=("anomaly-mode",),
        slots={
            "backward": """
                $opt.zero_grad()
                with torch.autograd.detect_anomaly(check_nan=True):
                    again = F.cross_entropy($model($x).float(), $y)
                    again.backward()
            """,
            "loss": "loss = torch.zeros(())",
        },
        tuned=False,
        styles=("functions",),
        machines=("gpu",),
    ),
    Fault(
        id="cache-emptied",
        expect=("cache-emptied-in-loop", "device-allocations"),
        slots={},
        after={"end": "torch.cuda.empty_cache()"},
        cured={},
        machines=("gpu",),
    ),
    Fault(
        id="collected-each-step",
        expect=("garbage-collected-in-loop", "cache-emptied-in-loop", "host-busy"),
        slots={"imports": "import gc"},
        after={"end": "gc.collect()"},
        cured={},
        styles=("functions", "trainer"),
        machines=("gpu",),
    ),
    Fault(
        id="cudnn-off",
        expect=("cudnn-off",),
        slots={"setup": "torch.backends.cudnn.enabled = False"},
        cured={},
        machines=("gpu",),
        styles=("functions", "trainer"),
        by_turns={
            "setup": TUNED["setup"],
            "begin": "torch.backends.cudnn.enabled = not alternate.faulty",
        },
    ),
    Fault(
        id="deterministic",
        expect=("deterministic-algorithms",),
        slots={"setup": "torch.use_deterministic_algorithms(True, warn_only=True)", "loss": _ENLARGED},
        cured={"loss": _ENLARGED},
        by_turns={"setup": "", "begin": "torch.use_deterministic_algorithms(alternate.faulty, warn_only=True)"},
        styles=("flat",),
        machines=("gpu",),
    ),
    Fault(
        id="blocking-launches",
        expect=("launch-blocking",),
        slots={"imports": "import os\nos.environ['CUDA_LAUNCH_BLOCKING'] = '1'", "sizes": _small()},
        styles=("flat",),
        machines=("gpu",),
    ),
    Fault(
        id="half-on-processor",
        expect=("half-without-hardware",),
        slots={"loss": 'with torch.autocast("cpu", torch.bfloat16):\n    loss = F.cross_entropy($model($x), $y)'},
        tuned=False,
        styles=("flat", "functions"),
        machines=("cpu",),
        cured={},
        needs=bf16_is_slow,
    ),
    Fault(
        id="one-thread",
        expect=("threads-fewer-than-cores",),
        slots={"setup": "torch.set_num_threads(1)", "sizes": SIZES.replace("(8, 1, 8, 24)", "(32, 1, 16, 48)")},
        cured={"sizes": SIZES.replace("(8, 1, 8, 24)", "(32, 1, 16, 48)")},
        by_turns={
            "setup": "alternate.by_wall, cores = True, torch.get_num_threads()",
            "begin": "torch.set_num_threads(1 if alternate.faulty else cores)",
        },
        tuned=False,
        styles=("flat", "trainer"),
        machines=("cpu",),
    ),
    # --- precision --------------------------------------------------------------------------------------------------
    Fault(
        id="double-sample-weights",
        expect=("double-precision",),
        slots={
            "imports": "import numpy as np",
            "model": TUNED["model"] + "\n${s}pixel_weights = torch.as_tensor(np.linspace(0.5, 1.5, side)).to($dev)",
        },
        after={
            "loss": "smooth = ($x.diff(dim=2).abs() * ${s}pixel_weights).exp().log1p().mean()\nloss = loss + 0.0 * smooth"
        },
        cured={
            "imports": "import numpy as np",
            "model": TUNED["model"]
            + "\n${s}pixel_weights = torch.as_tensor(np.linspace(0.5, 1.5, side)).float().to($dev)",
            "loss": textwrap.dedent(TUNED["loss"])
            + "smooth = ($x.diff(dim=2).abs() * ${s}pixel_weights).exp().log1p().mean()\nloss = loss + 0.0 * smooth\n",
        },
        machines=("gpu", "cpu"),
        styles=("flat", "trainer"),
        by_turns={
            "model": TUNED["model"]
            + "\n${s}exact = torch.as_tensor(np.linspace(0.5, 1.5, side)).to($dev)\n${s}single = ${s}exact.float()",
            "begin": "${s}pixel_weights = ${s}exact if alternate.faulty else ${s}single",
        },
    ),
    Fault(
        id="written-in-fp32",
        expect=("matrix-work-in-fp32", "convolutions-in-nchw"),
        slots={},
        tuned=False,
        machines=("gpu",),
        styles=("flat",),
    ),
    Fault(
        id="layout-nchw",
        expect=("convolutions-in-nchw", "layout-converted-around-convolutions"),
        slots={
            "model": "",
            "loss": """
                with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                    output = $model($x)
                loss = F.cross_entropy(output.float(), $y)
            """,
        },
        machines=("gpu",),
        styles=("flat", "functions"),
    ),
    Fault(
        id="clipped-while-scaled",
        expect=("clipping-scaled-gradients",),
        slots={
            "optimizer": TUNED["optimizer"] + '\n${s}scaler = torch.amp.GradScaler("cuda", enabled=True)',
            "loss": """
                with torch.autocast("cuda", torch.float16):
                    loss = F.cross_entropy($model($x), $y)
            """,
            "backward": """
                $opt.zero_grad()
                ${s}scaler.scale(loss).backward()
                torch.nn.utils.clip_grad_norm_($model.parameters(), 1.0)
            """,
            "update": "${s}scaler.step($opt)\n${s}scaler.update()",
        },
        styles=("functions", "trainer"),
        machines=("gpu",),
    ),
    # --- norms and layouts --------------------------------------------------------------------------------------------
    Fault(
        id="bias-before-norm",
        expect=("conv-bias-before-norm",),
        slots={"sizes": SIZES.replace("BIAS, norm = False", "BIAS, norm = True")},
        machines=("gpu",),
        styles=("flat", "trainer"),
    ),
    Fault(
        id="instance-norm",
        expect=("channels-last-lost", "layout-converted-around-convolutions", "norms-unfused"),
        slots={"sizes": SIZES.replace("nn.BatchNorm2d", "lambda c: nn.InstanceNorm2d(c, affine=True)")},
        machines=("gpu",),
    ),
    Fault(
        id="written-out-norm",
        expect=("norm-written-out", "elementwise-unfused", "layernorm-over-channels"),
        slots={
            "sizes": """
                width, depth, batch, side = (64, 3, 64, 64) if on_gpu else (8, 1, 8, 24)


                class Scaled(nn.Module):
                    def __init__(self, c):
                        super().__init__()
                        self.g, self.b = nn.Parameter(torch.ones(c, 1, 1)), nn.Parameter(torch.zeros(c, 1, 1))

                    def forward(self, t):
                        mean = t.mean(1, keepdim=True)
                        var = (t - mean).pow(2).mean(1, keepdim=True)
                        return self.g * (t - mean) / (var + 1e-6).sqrt() + self.b


                BIAS, norm = False, Scaled
            """
        },
        machines=("gpu",),
        styles=("flat",),
    ),
    # --- launches ------------------------------------------------------------------------------------------------------
    Fault(
        id="small-batch",
        expect=("launch-bound", "host-busy", "short-kernels", "batch-too-small", "host-sets-the-floor"),
        slots={"sizes": _small().replace("(32, 6, 16, 32)", "(32, 8, 4, 32)")},
        machines=("gpu",),
    ),
    Fault(
        id="optimizer-one-by-one",
        expect=("optimizer-unfused", "optimizer-loops-over-tensors", "optimizer-holds-the-host"),
        slots={
            "sizes": _small().replace("(32, 6, 16, 32)", "(32, 8, 128, 32)"),
            "optimizer": "$opt = torch.optim.Adam($model.parameters(), lr=1e-3, foreach=False)",
        },
        machines=("gpu",),
        styles=("functions", "trainer"),
    ),
    Fault(
        id="compiled-loss-new-sizes",
        expect=("recompiles",),
        slots={
            "setup": TUNED["setup"]
            + "\n\n@torch.compile(dynamic=False)\ndef smoothness(t):\n    return (torch.sigmoid(t).diff(dim=2) ** 2).mean() + t.exp().mean()\n",
        },
        after={"loss": "cut = 16 + 4 * ($n // 6 % 8)\nloss = loss + 1e-6 * smoothness($x[:, :, :cut])"},
        machines=("gpu",),
        styles=("flat",),
    ),
    # --- memory --------------------------------------------------------------------------------------------------------
    Fault(
        id="losses-kept",
        expect=("memory-growing",),
        slots={"epoch": "${s}all = ${s}all if done else []", "sizes": _small()},
        styles=("flat",),
        after={"end": "${s}all.append(loss + $x.mean((1, 2, 3)).sum() * $model[0].weight.mean())"},
        machines=("gpu",),
    ),
    Fault(
        id="leak-by-create-graph",
        expect=("memory-growing", "memory-growing-by-create-graph", "host-memory-growing"),
        slots={
            "sizes": _small("lambda c: nn.GroupNorm(4, c)"),
            "loss": "$x = $x.clone().requires_grad_(True)\nloss = F.cross_entropy($model($x), $y)",
            "backward": """
                $opt.zero_grad()
                loss.backward(create_graph=True)
                (0.1 * $x.grad.square().sum((1, 2, 3)).mean()).backward()
            """,
        },
        tuned=False,
        styles=("functions", "trainer"),
    ),
    Fault(
        id="host-memory",
        expect=("host-memory-growing", "memory-growing"),
        slots={"setup": TUNED["setup"] + "\nkept = []", "sizes": _small()},
        after={"end": "kept.append($x.detach().float().cpu().repeat(64, 1, 1, 1))"},
        styles=("flat",),
    ),
    Fault(
        id="recomputed",
        expect=("checkpointing-with-memory-to-spare",),
        slots={
            "imports": "from torch.utils.checkpoint import checkpoint",
            "loss": """
                with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                    output = checkpoint($model, $x.contiguous(memory_format=torch.channels_last), use_reentrant=False)
                loss = F.cross_entropy(output.float(), $y)
            """,
        },
        cured={},
        machines=("gpu",),
        styles=("flat", "trainer"),
    ),
    # --- input ---------------------------------------------------------------------------------------------------------
    Fault(
        id="no-workers",
        expect=("input-starved", "few-loader-workers", "loader-blocks-cpu-training"),
        slots=_loading(4096, 0.002, "$loader = torch.utils.data.DataLoader(Pictures(), batch)"),
        cured={**_loading(4096, 0.002, f"$loader = {_KEPT}"), "setup": TUNED["setup"] + "\n" + _FEWER_THREADS},
        by_turns=_by_epochs(512, 0.002, "torch.utils.data.DataLoader(Pictures(), batch)"),
        styles=("flat", "functions"),
    ),
    Fault(
        id="one-worker",
        expect=("few-loader-workers", "loader-cpu-saturated"),
        slots=_loading(
            8192,
            0.001,
            f"$loader = {_ONE}",
        ),
        cured={**_loading(8192, 0.001, f"$loader = {_KEPT}"), "setup": TUNED["setup"] + "\n" + _FEWER_THREADS},
        by_turns=_by_epochs(1024, 0.001, _ONE),
        machines=("gpu",),
        styles=("trainer",),
    ),
    Fault(
        id="short-epochs",
        expect=("workers-restart", "few-loader-workers", "loader-cpu-saturated"),
        slots=_loading("512 if on_gpu else 128", 0.0005, f"$loader = {_FRESH}"),
        cured=_loading("512 if on_gpu else 128", 0.0005, f"$loader = {_KEPT}"),
        by_turns={
            "loader": f"${{s}}fresh, ${{s}}kept = {_FRESH}, {_KEPT}",
            "epoch": "$loader = ${s}fresh if alternate.faulty else ${s}kept",
        },
    ),
    Fault(
        id="loader-in-epoch",
        expect=("workers-restart", "few-loader-workers", "loader-cpu-saturated"),
        slots={**_loading("640 if on_gpu else 160", 0.0005, ""), "epoch": f"$loader = {_FRESH}"},
        cured=_loading("640 if on_gpu else 160", 0.0005, f"$loader = {_KEPT}"),
        by_turns={
            "loader": f"${{s}}kept = {_KEPT}",
            "epoch": f"$loader = {_FRESH} if alternate.faulty else ${{s}}kept",
        },
        styles=("flat", "trainer"),
    ),
    Fault(
        id="pageable",
        cured={"sizes": SIZES.replace("(64, 3, 64, 64)", "(16, 1, 256, 128)")},
        expect=("copies-pageable", "pageable-copy-waits", "copies-stall-compute", "copies-not-overlapped"),
        slots={
            "loader": "images, labels = images.cpu(), labels.cpu()\n" + PLAIN["loader"],
            "begin": "$x, $y = $x.to($dev), $y.to($dev)",
            "sizes": SIZES.replace("(64, 3, 64, 64)", "(16, 1, 256, 128)"),
        },
        by_turns={
            "loader": "${s}there = "
            + PLAIN["loader"].split(" = ")[1]
            + "\nimages, labels = images.cpu(), labels.cpu()\n"
            "${s}here = " + PLAIN["loader"].split(" = ")[1],
            "epoch": "$loader = ${s}here if alternate.faulty else ${s}there",
        },
        machines=("gpu",),
        styles=("flat", "functions"),
    ),
    Fault(
        id="more-workers-than-cores",
        expect=("more-workers-than-cores",),
        slots=_loading(
            2048,
            0.002,
            f"$loader = {_EIGHT}",
        ),
        cured={**_loading(2048, 0.002, f"$loader = {_KEPT}"), "setup": TUNED["setup"] + "\n" + _FEWER_THREADS},
        by_turns=_by_epochs(512, 0.002, _EIGHT),
        machines=("cpu",),
        styles=("functions",),
    ),
    # --- nothing planted ------------------------------------------------------------------------------------------------
    Fault(id="sound", expect=(), slots={}),
)
