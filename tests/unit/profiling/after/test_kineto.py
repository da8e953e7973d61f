"""Traces of torch.profiler made elsewhere: what they carry is known, and nothing else is."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

from advisor import analysis, pipeline
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.loop.records import load_trace
from advisor.profiling.after.kineto import imported

GPU = {
    "id": 0,
    "name": "NVIDIA H100",
    "totalGlobalMem": 85_000_000_000,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
}


def span(cat, name, at, length, tid=11, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": length, "args": args}


def gpu_trace():
    """Two steps, each with a convolution in fp32 and NCHW, its kernel, and a copy that the host waits for."""
    events = []
    for step, at in ((3, 1000.0), (4, 2000.0)):
        i = int(at)
        given = {"Input Dims": [[2, 4, 9, 9], [8, 4, 3, 3]], "Input type": ["float", "float"],
                 "Input Strides": [[324, 81, 9, 1], [36, 9, 3, 1]], "Concrete Inputs": ["", "", "True", "[1, 1]"]}  # fmt: skip
        events += [
            span("user_annotation", f"ProfilerStep#{step}", at, 1000.0),
            span("python_function", "nn.Module: Conv2d_0", at + 90, 120.0),
            span("cpu_op", "aten::convolution", at + 100, 100.0, **given, **{"External id": i, "Sequence number": 5}),
            span("cuda_runtime", "cudaLaunchKernel", at + 110, 5.0, correlation=i + 1, **{"External id": i}),
            span("kernel", "sgemm_nchw", at + 150, 400.0, tid=7, correlation=i + 1, stream=7, device=0,
                 grid=[4, 1, 1], block=[128, 1, 1], **{"External id": i}),
            span("cuda_runtime", "cudaMemcpyAsync", at + 600, 50.0, correlation=i + 2),
            span("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", at + 610, 20.0, correlation=i + 2, stream=7, bytes=4),
            span("kernel", "lost", 0, "nothing"),
        ]  # fmt: skip
    return {"schemaVersion": 1, "deviceProperties": [GPU], "traceEvents": events, "distributedInfo": {"world_size": 8}}


def read(tmp_path, document, name="rank0.json"):
    file = tmp_path / name
    text = json.dumps(document).encode()
    file.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return imported(file, run_dir), load_trace(run_dir / "trace.json")


@pytest.mark.parametrize("name", ["rank0.json", "rank0.pt.trace.json.gz"])
def test_operators_kernels_and_steps_are_read(tmp_path, name):
    machine, trace = read(tmp_path, gpu_trace(), name)
    assert (machine.gpu_name, machine.sm_arch, machine.sm_count) == ("NVIDIA H100", 90, 132)
    assert trace.step_bounds_ns == [1_000_000, 2_000_000, 3_000_000]
    assert (trace.device, len(trace.kernels.name), trace.launches, trace.launches_matched) == ("cuda", 4, 2, 2)
    assert trace.kernels.grid[0] == "4x1x1"
    conv = trace.ops.name.index("aten::convolution")
    assert (trace.ops.shapes[conv], trace.ops.arguments[conv]) == (
        "[[2, 4, 9, 9], [8, 4, 3, 3]]", "[null, null, true, [1, 1]]",
    )  # fmt: skip
    assert "module:Conv2d_0|Conv2d" in trace.ops.annotation


def test_the_profile_has_what_the_trace_carries_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps(gpu_trace()))
    result = pipeline.profile_trace(tmp_path / "t.json", say=lambda _: None)
    profile = result.profile
    assert (profile.step_us.median, profile.step_us.n, profile.origin) == (1000.0, 2, "t.json")
    assert {row.kind for row in profile.kernels} >= {"conv"}
    table = analysis.metrics(profile)
    assert table["conv_frac"].value > 0.9
    assert (table["autocast"].value, table["channels_last"].value, table["bf16_supported"].value) == ("", False, True)
    for unknown in ("workers", "pin_memory", "cudnn_benchmark", "zero_grad_to_none", "limit_frac", "peak_memory_frac"):
        assert table[unknown].value is None, unknown
    fired = {f.rule for f in result.findings.findings if f.outcome.value == "fired"}
    assert "matrix-work-in-fp32" in fired
    assert (result.run_dir / "report.html").exists()


def test_a_trace_that_torch_writes_is_read(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.profiler.profile(record_shapes=True, with_modules=True) as profiler:
        for _ in range(2):
            net(torch.randn(2, 3, 8, 8)).sum().backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "real.json"))
    (tmp_path / "run").mkdir()
    machine = imported(tmp_path / "real.json", tmp_path / "run")
    trace = load_trace(tmp_path / "run" / "trace.json")
    assert machine == Environment(cpu_name="another machine", notes=machine.notes)
    assert len(trace.step_bounds_ns) == 2  # from the end of one optimizer step to that of the next
    assert "aten::convolution" in trace.ops.name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "no JSON"),
        (b"{", "cut off"),
        (b"[]", "no list traceEvents"),
        (b'{"traceEvents": 3}', "no list traceEvents"),
        (b'{"traceEvents": []}', "no operator and no kernel"),
        (b'{"traceEvents": [1, {"ph": "X"}, {"ph": "X", "ts": "x", "dur": 1, "cat": "cpu_op"}]}', "no operator"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
        (gzip.compress(b'{"traceEvents": []}')[:20], "cannot be read"),
        (b"\xff\xfe\x00", "no JSON"),
    ],
)
def test_what_is_no_trace_is_one_clear_line(tmp_path, text, says):
    (tmp_path / "bad.json").write_bytes(text)
    with pytest.raises(AdvisorError, match=says):
        imported(tmp_path / "bad.json", tmp_path)


def test_a_file_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(AdvisorError, match="No such file"):
        imported(tmp_path / "gone.json", tmp_path)
