"""Every kernel compiles for every architecture without spills; results on file belong to the sources as they are."""

from __future__ import annotations

import ctypes
import glob
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from advisor.core import architectures
from advisor.ops import catalog, sources
from advisor.ops.batchnorm_act import spec
from advisor.resources import kernel_entries, kernels_dir

# All of the table, as far as the compiler here knows them: what was measured first.
ARCHITECTURES = tuple(
    str(row.sm)
    for row in sorted(architectures.ROWS, key=lambda row: row is not architectures.MEASURED)
    if row.sm >= architectures.BUNDLED_KERNELS
)
# How many variants of a source `make test-long` compiles at most, spread over all: the same code fits or spills much alike.
VARIANTS = 8
# Bytes that are known to be spilled, or to lie in a stack frame. 12 warps with 24 channels a group at stride 2 want more registers than other
# architectures than sm_90 and sm_100 leave them, and strips of a depthwise convolution want two more on sm_120: neither was ever measured
# there. NVRTC 13.2 spills one of a norm's gradient on sm_100, 13.5 does not.
# Winograd's weight gradient is bound by memory, and was measured so on sm_90: what it spills is of sums of a value that is not finite.
# Winograd's results of a gradient spill on sm_90 too, and were measured so: three blocks an SM were faster than two.
SPILLED = {
    ("winograd/winograd_output.cu", "80"): {"8", "12", "16"},
    ("winograd/winograd_output.cu", "90"): {"4", "8"},
    ("winograd/winograd_weight.cu", "80"): {"40", "48", "52"},
    **{("winograd/winograd_weight.cu", arch): {"40", "44", "48"} for arch in ("86", "87", "89")},
    ("winograd/winograd_weight.cu", "90"): {"40", "44"},
    **{("winograd/winograd_weight.cu", arch): {"72", "88", "148"} for arch in ("100", "103")},
    ("grouped/grouped_whole_backward_data.cu", "80"): {"8"},
    **{("grouped/grouped_whole_backward_data.cu", arch): {"12", "16"} for arch in ("86", "87", "89")},
    **{("grouped/grouped_whole_backward_data.cu", arch): {"64"} for arch in ("120", "121")},
    **{("depthwise/depthwise_band.cu", arch): {"8"} for arch in ("120", "121")},
    ("batchnorm/batchnorm_act_backward.cu", "100"): {"4", "8"},
}
REGISTERS_PER_SM = 65536  # and a thread may have 255
REPO = kernels_dir().parent
SOURCES = {name: family for family in catalog.FAMILIES for name in family.kernels}


class Nvrtc:
    """NVRTC from its own wheel: a compiler that needs no GPU and no driver."""

    def __init__(self) -> None:
        found = find_spec("nvidia")
        places = [
            p
            for root in (found.submodule_search_locations if found else ())
            for p in glob.glob(f"{root}/**/libnvrtc.so.*", recursive=True)
        ]
        libraries = sorted((p for p in places if "alt" not in Path(p).name), key=lambda p: int(p.rpartition(".")[2]))
        if not libraries:
            pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
        self.lib = ctypes.CDLL(libraries[-1])
        count = ctypes.c_int()
        self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self.lib.nvrtcGetSupportedArchs(known)
        self.architectures = frozenset(map(str, known))

    def compile(self, text: str, options: list[str]) -> str:
        """The compiler's log; raises with it when the source is refused."""
        program = ctypes.c_void_p()
        self.lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
        encoded = [o.encode() for o in options]
        status = self.lib.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        size = ctypes.c_size_t()
        self.lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.lib.nvrtcGetProgramLog(program, log)
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        if status:
            raise RuntimeError(log.value.decode())
        return log.value.decode()


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def options(arch: str, defines: dict[str, int]) -> list[str]:
    return [
        f"--gpu-architecture=sm_{arch}",
        "-std=c++17",
        "--ptxas-options=-v",
        *(f"-D{name}={value}" for name, value in defines.items()),
    ]


def begins_too_early(text: str) -> list[str]:
    """The kernels of a source that is launched early which do not wait, first of all, for the kernel ahead of them."""
    bodies = re.findall(r"__global__[^;{]*?(\w+)\(([^;{]*?)\) \{\n *(.*)", text)
    assert len(bodies) == text.count("__global__")
    return [name for name, _, first in bodies if first != "overlap_launches();"]


@pytest.mark.parametrize("name", SOURCES)
def test_a_kernel_that_is_launched_early_waits_before_all_else(name: str) -> None:
    text = sources.source(name)
    if sources.overlaps(name):
        assert not begins_too_early(text)
        assert begins_too_early(
            text.replace("overlap_launches();\n", "", 2).replace("{\n", "{\n  overlap_launches();\n", 0)
        )
    else:
        assert "overlap_launches" not in text


def is_launched(name: str, arch: str) -> bool:
    """Not where the architecture lacks what it uses."""
    return not sources.lacks(name, int(arch))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "arch"), [(name, arch) for name in SOURCES for arch in ARCHITECTURES if is_launched(name, arch)]
)
def test_compiles_without_spills(nvrtc: Nvrtc, name: str, arch: str) -> None:
    """The last variant, which has most of what a source may have."""
    compiles_without_spills(nvrtc, name, arch, 1)


@pytest.mark.long
@pytest.mark.parametrize("name", SOURCES)
def test_other_variants_compile_without_spills(nvrtc: Nvrtc, name: str) -> None:
    compiles_without_spills(nvrtc, name, "90", VARIANTS)


def compiles_without_spills(nvrtc: Nvrtc, name: str, arch: str, count: int) -> None:
    if arch not in nvrtc.architectures:
        pytest.skip(f"NVRTC here does not compile for sm_{arch}")
    family = SOURCES[name]
    variants = family.variants_of(name, int(arch))
    if not variants:
        pytest.skip(f"no block of {name} fits on sm_{arch}")
    step = -(-len(variants) // count)
    for defines in variants[::-step]:
        log = nvrtc.compile(sources.source(name), [*options(arch, defines), *sources.target(name)])
        registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
        assert len(registers) == len(family.kernels[name]), log
        threads = defines.get("THREADS", 256)
        assert max(registers) <= min(255, REGISTERS_PER_SM // threads), (defines, log)
        known = {"0"} | SPILLED.get((name, arch), set())
        assert set(re.findall(r"(\d+) bytes spill", log)) <= known, (defines, log)
        assert set(re.findall(r"(\d+) bytes stack frame", log)) <= known, (defines, log)
        assert "serialized" not in log, (defines, log)  # products of warpgroups, which then wait for each other


def test_a_spill_would_be_seen(nvrtc: Nvrtc) -> None:
    greedy = (
        'extern "C" __global__ void __launch_bounds__(1024) f(float* x) { float v[200];\n'
        "for (int i = 0; i < 200; ++i) v[i] = x[i * 1024 + threadIdx.x];\n"
        "__syncthreads(); for (int i = 0; i < 200; ++i) x[i * 1024 + (threadIdx.x ^ 1)] = v[i] * v[199 - i]; }"
    )
    log = nvrtc.compile(greedy, ["--gpu-architecture=sm_90", "--ptxas-options=-v"])
    assert set(re.findall(r"(\d+) bytes (?:spill|stack)", log)) != {"0"}


def test_every_source_is_in_the_catalog() -> None:
    assert set(sources.all_names()) == set(SOURCES)


def test_entries_are_those_of_the_sources() -> None:
    listed = [entry for name, family in SOURCES.items() for entry in family.kernels[name]]
    assert len(set(listed)) == len(listed)  # a trace tells kernels by name
    assert set(listed) == kernel_entries()
    assert not [name for name in SOURCES if "#include" in sources.source(name)]


def test_hash_covers_included_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "kernels"
    shutil.copytree(kernels_dir(), copy)
    monkeypatch.setattr(sources, "kernels_dir", lambda: copy)
    sources.source.cache_clear()
    before = sources.sha256(spec.FORWARD)
    with open(copy / "include" / "vector.cuh", "a") as stream:
        stream.write("// changed\n")
    sources.source.cache_clear()
    after = sources.sha256(spec.FORWARD)
    monkeypatch.undo()
    sources.source.cache_clear()
    assert before != after
