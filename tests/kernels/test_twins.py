"""Headers with PTX: each has an emulated twin that offers the same, and one small kernel goes through both compilers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from emulation.compiler import INCLUDE, EmulationError
from test_sources import ARCHITECTURES, Nvrtc

from advisor.ops import sources
from advisor.resources import kernels_dir

PTX = sorted(path for path in (kernels_dir() / "include").glob("*.cuh") if re.search(r"\basm\b", path.read_text()))
_FUNCTION = re.compile(
    r"^(?:template <[^>]*>\n)?(?:__device__ __forceinline__|inline|void) [^=;{]*?(\w+)\(", re.MULTILINE
)

# One warp: y[16, 8] = a[16, K] b[K, 8], K = 32, both row-major 16-bit; or K = 8 of fp32 for tf32.
PRODUCT = """
#include "mma.cuh"
#include "cp_async.cuh"

extern "C" __global__ void product(const unsigned short* a, const unsigned short* b, float* y) {
  __shared__ __align__(16) unsigned short sa[2][16][24], sb[2][16][8];
  const int lane = threadIdx.x;
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  for (int stage = 0; stage < 2; ++stage) {
    cp_async16(&sa[stage][lane / 2][lane % 2 * 8], a + lane / 2 * 32 + stage * 16 + lane % 2 * 8);
    if (lane < 16) cp_async16(&sb[stage][lane][0], b + (stage * 16 + lane) * 8, lane != LEFT_OUT);
    cp_async_commit();
  }
  for (int stage = 0; stage < 2; ++stage) {
    if (stage == 0) cp_async_wait<WAIT>(); else cp_async_wait<0>();
    __syncthreads();
    unsigned int fa[4], fb[2];
    ldmatrix_x4(fa, &sa[stage][lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(fb, &sb[stage][lane % 16][0]);
    MMA(d, fa, fb);
  }
  const int g = lane / 4, t = lane % 4;
  for (int r = 0; r < 4; ++r) y[(g + r / 2 * 8) * 8 + t * 2 + r % 2] = d[r];
}

extern "C" __global__ void product_tf32(const float* a, const float* b, float* y) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const unsigned int fa[4] = {to_tf32(a[g * 8 + t]), to_tf32(a[(g + 8) * 8 + t]), to_tf32(a[g * 8 + t + 4]),
                              to_tf32(a[(g + 8) * 8 + t + 4])};
  const unsigned int fb[2] = {to_tf32(b[t * 8 + g]), to_tf32(b[(t + 4) * 8 + g])};
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  mma_tf32(d, fa, fb);
  for (int r = 0; r < 4; ++r) y[(g + r / 2 * 8) * 8 + t * 2 + r % 2] = d[r];
}
"""
DEFINES = {"MMA": "mma_bf16", "WAIT": 1, "LEFT_OUT": -1}


@pytest.fixture
def product(tmp_path: Path) -> Path:
    path = tmp_path / "product.cu"
    path.write_text(PRODUCT)
    return path


def emulated_text(path: Path) -> str:
    return sources.inlined(path, (INCLUDE, kernels_dir() / "include"))


def names(path: Path) -> set[str]:
    return set(_FUNCTION.findall(path.read_text()))


@pytest.mark.parametrize("header", PTX, ids=lambda path: path.name)
def test_every_header_with_ptx_has_a_twin_that_offers_the_same(header: Path) -> None:
    twin = INCLUDE / header.name
    assert names(header)
    assert names(header) <= names(twin)
    macros = re.compile(r"^#define ((?!PTX_)\w+ .*)$", re.MULTILINE)  # PTX_: parts of an instruction's text
    assert set(macros.findall(header.read_text())) == set(macros.findall(twin.read_text()))


def test_no_kernel_has_ptx_of_its_own() -> None:
    assert [p.name for p in kernels_dir().glob("*/*.cu") if re.search(r"\basm\b", p.read_text())] == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_headers_compile(product: Path, arch: str) -> None:
    text = sources.inlined(product, (kernels_dir() / "include",))
    everything = "".join(
        f"__device__ void use_{n}({kind}) {{ {n}({call}); }}\n"
        for n, kind, call in (
            ("mma_f16", "float (&d)[4], unsigned (&a)[4], unsigned (&b)[2]", "d, a, b"),
            ("ldmatrix_x4_trans", "unsigned (&r)[4], void* p", "r, p"),
            ("ldmatrix_x2", "unsigned (&r)[2], void* p", "r, p"),
            ("cp_async8", "void* p, void* q", "p, q"),
            ("cp_async4", "void* p, void* q", "p, q"),
        )
    )
    compiler = Nvrtc()
    if arch not in compiler.architectures:
        pytest.skip(f"NVRTC here does not compile for sm_{arch}")
    log = compiler.compile(
        text + everything, [f"--gpu-architecture=sm_{arch}", "-std=c++17", *(f"-D{k}={v}" for k, v in DEFINES.items())]
    )
    assert "error" not in log


@pytest.mark.parametrize(("dtype", "mma"), [(torch.bfloat16, "mma_bf16"), (torch.float16, "mma_f16")])
def test_a_product_through_copies_ldmatrix_and_mma(emulated, product: Path, dtype: torch.dtype, mma: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 32), (32, 8)))
    kernel = emulated.compiled(emulated_text(product), "product", {**DEFINES, "MMA": mma})
    for _ in range(4):
        y = torch.empty(16, 8)
        kernel((1,), (32,), (a.data_ptr(), b.data_ptr(), y.data_ptr()))
        torch.testing.assert_close(y, (a.double() @ b.double()).float(), rtol=1e-6, atol=1e-6)
    y = torch.empty(16, 8)
    b[5] = 0  # both stages' row 5 of b, as LEFT_OUT leaves it
    b[21] = 0
    kernel((1,), (32,), (a.data_ptr(), b.data_ptr(), y.data_ptr()))
    without = torch.empty(16, 8)
    b[5] = 7.0
    b[21] = 7.0
    left_out = emulated.compiled(emulated_text(product), "product", {**DEFINES, "MMA": mma, "LEFT_OUT": 5})
    left_out((1,), (32,), (a.data_ptr(), b.data_ptr(), without.data_ptr()))
    assert torch.equal(y, without)


def test_a_tf32_product(emulated, product: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b, y = torch.randn(16, 8, generator=generator), torch.randn(8, 8, generator=generator), torch.empty(16, 8)
    kernel = emulated.compiled(emulated_text(product), "product_tf32", DEFINES)
    kernel((1,), (32,), (a.data_ptr(), b.data_ptr(), y.data_ptr()))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).double()

    torch.testing.assert_close(y, (rounded(a) @ rounded(b)).float(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(y.double(), a.double() @ b.double(), rtol=0, atol=1e-6)


def test_a_wait_that_is_too_short_is_found(emulated, product: Path) -> None:
    a, b = torch.ones(16, 32).bfloat16(), torch.ones(32, 8).bfloat16()
    kernel = emulated.compiled(emulated_text(product), "product", {**DEFINES, "WAIT": 2})
    y = torch.empty(16, 8)
    kernel((1,), (32,), (a.data_ptr(), b.data_ptr(), y.data_ptr()))
    assert y.isnan().any()


def test_a_lane_that_stays_away_from_an_mma_is_found(emulated, product: Path) -> None:
    a, b = torch.ones(16, 32).bfloat16(), torch.ones(32, 8).bfloat16()
    kernel = emulated.compiled(
        emulated_text(product).replace("MMA(d, fa, fb);", "if (lane) MMA(d, fa, fb);"), "product", DEFINES
    )
    y = torch.empty(16, 8)
    with pytest.raises(EmulationError, match=r"without all lanes|wait for each other"):
        kernel((1,), (32,), (a.data_ptr(), b.data_ptr(), y.data_ptr()))
