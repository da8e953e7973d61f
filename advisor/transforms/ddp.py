"""Settings of DistributedDataParallel, the script's own or that of `--gpus N`: another one is made, with them, between two steps.

Every rank switches at the same boundary (trials/across.py). The script's own wrapper stays the script's object: calls go past it to the
other one (rewrapped.py).

- Buckets that gradients are views of spare a copy of each gradient a step, and their memory.
- Larger buckets make fewer and faster messages; smaller ones begin sooner. Which is better is tried.
- A static graph lets it order its buckets by the first backward and skip the search for unused parameters.
- Gradients sent as bf16 or fp16 take half the time on the wire: another precision.
- Under accumulation only the last backward of a step needs to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.nn.parallel import DistributedDataParallel

from advisor.core.profile import StepProfile
from advisor.core.units import bytes_text
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms import rewrapped
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing
from advisor.transforms.rewrapped import Rewrapped, refused


class _Setting(Transform):
    """One of them."""

    traced = False  # live state shows it
    settings: ClassVar[dict[str, Any]] = {}

    def wanted(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """What it sets, by name."""
        return dict(self.settings)

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        layers = rewrapped.layers(training)
        if not layers:
            return Match(applies=False, reason="no model has a DistributedDataParallel around it")
        for root in training.roots:
            if isinstance(root.module, DistributedDataParallel) and (why := refused(root.module)):
                return Match(applies=False, reason=why)
        wanted = self.wanted(parameters)
        if all(layer.settings.get(name) == value for layer in layers for name, value in wanted.items()):
            return Match(applies=False, reason="it is set already")
        return Match(applies=True, sites=tuple(f"{name}={value}" for name, value in wanted.items()))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            for layer in rewrapped.layers(training):
                before = dict(layer.settings)
                undo.push(lambda layer=layer, before=before: layer.change(before))
                layer.change({**before, **self.wanted(parameters)})
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        wanted, layers = self.wanted({}), rewrapped.layers(training)
        on = bool(layers) and all(
            layer.settings.get(name) == value for layer in layers for name, value in wanted.items()
        )
        return Check(passed=on, detail=", ".join(f"{name}={value}" for name, value in wanted.items()))


class BucketViews(_Setting):
    """Gradients are views of the buckets they are sent in."""

    id = "ddp_bucket_views"
    settings: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True}


class Buckets(_Setting):
    """Buckets of another size. Parameter `mb`."""

    id = "ddp_buckets"

    def wanted(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        return {"bucket_cap_mb": float(parameters.get("mb", "100"))}

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        sizes = {layer.settings.get("bucket_cap_mb") for layer in rewrapped.layers(training)}
        return Check(
            passed=bool(sizes - {None}),
            detail=f"buckets of {', '.join(bytes_text((size or 0) * 2**20) for size in sizes)}",
        )


class StaticGraph(_Setting):
    """The same parameters take part in each step."""

    id = "ddp_static_graph"
    settings: ClassVar[dict[str, Any]] = {"static_graph": True, "find_unused_parameters": False}


class SentAsBf16(_Setting):
    """Gradients travel as bf16."""

    id = "ddp_bf16_gradients"
    settings: ClassVar[dict[str, Any]] = {"sent_as": "bf16"}

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="torch sends bf16 over NCCL alone")
        return super().match(training, parameters)


class SentAsFp16(_Setting):
    """Gradients travel as fp16."""

    id = "ddp_fp16_gradients"
    settings: ClassVar[dict[str, Any]] = {"sent_as": "fp16"}


class SentOnce(_Setting):
    """Of several backward passes a step, the last one sends. Parameter `passes`, their number."""

    id = "ddp_no_sync"

    def wanted(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        return {"passes": int(parameters.get("passes", "1"))}

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if self.wanted(parameters)["passes"] < 2:
            return Match(applies=False, reason="a step has one backward pass")
        if any(isinstance(layer, Rewrapped) for layer in rewrapped.layers(training)):
            return Match(applies=False, reason="when to send is the script's own to say, by `no_sync`")
        return super().match(training, parameters)

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        kept = sum(layer.held_back for layer in rewrapped.layers(training))
        return Check(passed=kept > 0, detail=f"{kept} backward passes did not send")
