"""A stand-in for `advisor.pipeline` that records what the command line asks of it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import advisor
from advisor.analysis import scaling
from advisor.cli.main import cli
from advisor.core.held import HeldRow, MemoryLook
from advisor.core.profile import StepProfile
from advisor.core.trace import OpTable, Trace

sys.path.insert(0, str(Path(__file__).parents[1] / "reporting"))
import samples


def _trace_of(profile: StepProfile) -> Trace:
    """With the operators of a profile's rows, as far as what repeats them asks for."""
    rows = [row for row in profile.kernels if row.op]
    count = len(rows)
    operators = OpTable(
        name=[row.op for row in rows],
        start_ns=list(range(count)),
        end_ns=list(range(1, count + 1)),
        shapes=[row.shapes for row in rows],
        dtypes=["float,float"] * count,
        strides=[""] * count,
        arguments=[""] * count,
    )
    return Trace(device="cuda", step_bounds_ns=[0, count], ops=operators)


class FakePipeline(types.ModuleType):
    """Each function keeps its arguments in `calls` and returns a sample run."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__("advisor.pipeline")
        self.__path__ = [str(Path(advisor.__file__).parent / "pipeline")]  # its modules stay those that they are
        self.run_dir, self.exit_code, self.calls = run_dir, 0, {}
        self.error: BaseException | None = None
        self.attempt: Any = samples.attempt()
        self.runs: dict[str, Any] = {}
        self.proofs: dict[str, Any] = {}
        self.kernel_rows = [{"family": "batchnorm_act", "case": "bn", "passed": True, "detail": ""}]

    def _record(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.calls[name] = (args, kwargs)
        if self.error:
            raise self.error

    def profile(self, words, **kwargs):
        self._record("profile", words, **kwargs)
        kwargs["say"]("step 3 of 20")
        return SimpleNamespace(
            run_dir=self.run_dir, exit_code=self.exit_code, profile=samples.resnet50(), findings=samples.findings()
        )

    def recommend(self, run, **kwargs):
        self._record("recommend", run, **kwargs)
        return samples.resnet50(), samples.findings()

    def apply(self, words, **kwargs):
        self._record("apply", words, **kwargs)
        return SimpleNamespace(
            run_dir=self.run_dir,
            exit_code=self.exit_code,
            profile=samples.resnet50(),
            findings=samples.findings(),
            log=None if kwargs.get("dry_run") else samples.trials(),
            plan=None,
            plan_file=None,
        )

    def prove(self, words, **kwargs):
        self._record("prove", words, **kwargs)
        log = samples.trials()
        return SimpleNamespace(
            run_dir=self.run_dir, exit_code=self.exit_code, profile=None, findings=None, log=log, plan=None,
            plan_file=None,
        )  # fmt: skip

    def profile_trace(self, file, **kwargs):
        self._record("profile_trace", file, **kwargs)
        return SimpleNamespace(
            run_dir=self.run_dir, exit_code=0, profile=samples.resnet50(), findings=samples.findings()
        )

    def memory(self, words, **kwargs):
        self._record("memory", words, **kwargs)
        look = MemoryLook(rows=(HeldRow(kind="activation", module="Net", nbytes=64, count=1),), step_us=1_000.0)
        return SimpleNamespace(look=look, others=(), batch=32, memory_bytes=0)

    def scale(self, run, gpus, **kwargs):
        self._record("scale", run, gpus, **kwargs)
        inside, outside = scaling.link("nvlink"), scaling.link("ib400")
        rows = scaling.foretell(samples.resnet50(), gpus, inside=inside, between=outside, host=8)
        return SimpleNamespace(rows=rows, one_us=116_600.0, links=("inside a host: 3 µs",), device="cuda")

    def try_patch(self, words, patch, **kwargs):
        self._record("try_patch", words, patch=patch, **kwargs)
        return self.attempt

    def load_proof(self, run):
        return self.proofs.get(str(run))

    def run(self, words, **kwargs):
        self._record("run", words, **kwargs)
        return self.exit_code

    def load_profile(self, run):
        self._record("load_profile", run)
        return self.run_dir, self.runs.get(str(run), samples.resnet50())

    def load_run(self, run):
        self._record("load_run", run)
        profile = self.load_profile(run)[1]
        return SimpleNamespace(
            run_dir=self.run_dir, profile=profile, findings=samples.findings(), trials=samples.trials()
        )

    def kernels_list(self):
        facts = {"family": "batchnorm_act", "entries": "fwd_stats, fwd_apply", "sha256": "ab12"}
        return [{"kernel": "batchnorm_act_fwd", "replaces": "BatchNorm + add + ReLU", **facts}]

    def kernels_verify(self, say, family):
        self._record("kernels_verify", family)
        return self.kernel_rows


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePipeline:
    fake = FakePipeline(tmp_path)
    monkeypatch.setitem(sys.modules, "advisor.pipeline", fake)
    monkeypatch.setattr(advisor, "pipeline", fake, raising=False)
    for name in ("load_profile", "load_proof", "load_run"):
        monkeypatch.setattr(f"advisor.runs.{name}", getattr(fake, name))
    monkeypatch.setattr("advisor.loop.records.load_trace", lambda path: _trace_of(samples.resnet50()))
    return fake


@pytest.fixture
def invoke(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("ADVISOR_LOG", raising=False)

    def call(*args: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, list(args), input=stdin)

    return call
