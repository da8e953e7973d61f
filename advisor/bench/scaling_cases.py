"""What `advisor bench scaling` measures: trainings, ways to train them on several GPUs, and the words that the scripts are started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from advisor.bench import models
from advisor.trials import fresh

TRAININGS = ("resnet50_b256", "mobilenet_v3_large_b256", "convnext_tiny_b256")
WITH_LOADERS = ("unet64_b32", "cifar_resnet18_b128")
WITHOUT_NORMS = ("convnext_tiny_b256",)  # of batches: `parts` and `whole` are one way
ONE, PARTS, WHOLE, TORCHRUN, SAME = "one", "parts", "whole", "torchrun", "same"
RANKS = (2, 4)
# A batch that is divided, as written: small enough that 300 steps take seconds.
DIVIDED = ("resnet18_b256_128px", ("imagenet.py", "--arch", "resnet18", "-b", "256", "--image-size", "128"))
COMPARED = 300 - fresh.WARMUP
AS_WRITTEN, EAGER = "as written", "eager"
# What a case applies beside the plan, by what it is called; AS_WRITTEN: neither; EAGER: the plan without its CUDA graphs.
SENT: dict[str, tuple[str, ...]] = {
    "": (),
    "views": ("ddp_bucket_views", "ddp_static_graph"),
    AS_WRITTEN: (),
    EAGER: (),
}
FORETOLD = ("resnet50_b256",)  # trainings whose one GPU is profiled for predictions
# Graphs, kernels and cuDNN's choices stand behind so many steps. Ranks take RANKS_FACTOR (trials/measure.py) as many timed ones.
WARMUP, TIMED, RESIDENT = 24, 40, 2048
STEPS = 2 * (WARMUP + 2 * TIMED)  # of an epoch: none ends meanwhile
_BATCH, _SIZES = (
    ("-b", "--batch-size"),
    {"imagenet.py": "--val-size", "unet.py": "--val-size", "cifar.py": "--test-size"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingCase:
    """One training in one way; `sent` is a key of SENT."""

    training: str
    way: str
    ranks: int
    sent: str = ""

    @property
    def name(self) -> str:
        """As --filter takes it."""
        return " ".join(filter(None, (self.training, self.way, self.sent, f"x{self.ranks}")))


def cases(gpus: int) -> list[ScalingCase]:
    """All that so many GPUs can run."""
    found = []
    several = [n for n in RANKS if n <= gpus]
    for name in (*TRAININGS, *WITH_LOADERS):
        ways = (PARTS, TORCHRUN) if name in WITHOUT_NORMS else (PARTS, WHOLE, TORCHRUN)
        ways = ways if name in TRAININGS else (PARTS, WHOLE)  # these scripts do not know torchrun
        found += [ScalingCase(training=name, way=ONE, ranks=1, sent=sent) for sent in ("", AS_WRITTEN)]
        found += [ScalingCase(training=name, way=way, ranks=n) for n in several for way in ways]
        found += [
            ScalingCase(training=name, way=PARTS, ranks=n, sent=sent) for n in several for sent in ("views", EAGER)
        ]
        found += [
            ScalingCase(training=name, way=ways[-1 if name in WITH_LOADERS else -2], ranks=n, sent=AS_WRITTEN)
            for n in several
        ]
    return [*found, *(ScalingCase(training=DIVIDED[0], way=SAME, ranks=n) for n in RANKS if n <= gpus)]


def words_of(case: ScalingCase, examples: Path) -> tuple[tuple[str, ...], int]:
    """The script's words without a launcher, and the batch of each GPU."""
    name, *words = DIVIDED[1] if case.way == SAME else models.SCRIPTS[case.training]
    words = [word for word in words if word != "--device-data"]  # ranks divide what a loader has loaded
    if "--epochs" in words:
        del words[words.index("--epochs") : words.index("--epochs") + 2]
    batch = int(case.training.split("_b")[1].split("_")[0])
    each = batch if case.way in (ONE, TORCHRUN, SAME) else batch * case.ranks  # what the script is told
    at = next((words.index(word) for word in _BATCH if word in words), len(words))
    words[at : at + 2] = [_BATCH[1], str(each)]
    if name == "imagenet.py":
        words += ["--resident", str(RESIDENT), "-p", str(STEPS)]
    if name == "cifar.py":
        words += ["--workers", "12"]
    sizes = ("--train-size", str(batch * case.ranks * STEPS), _SIZES[name], str(batch * case.ranks), "--epochs", "2")
    return (str(examples / name), *words, *sizes), batch
