"""What kernels may read in 16-byte vectors."""

from __future__ import annotations

import pytest
import torch

from advisor.ops import alignment


def whole(n: int = 2, c: int = 24, h: int = 3, w: int = 5, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(n, h, w, c, dtype=dtype).permute(0, 3, 1, 2)


def test_the_pitch_of_a_slice_is_that_of_the_whole() -> None:
    assert alignment.pitch(whole()) == 24
    assert alignment.pitch(whole()[:, 8:16]) == 24
    assert alignment.pitch(whole()[:, 16:]) == 24
    assert alignment.pitch(whole(h=1, w=1)[:, 8:16]) == 24
    assert alignment.pitch(whole(w=1)[:, 8:16]) == 24
    assert alignment.pitch(whole(n=1, h=1, w=1)[:, 8:16]) == 8  # one pixel: any


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (whole()[:, 4:12], "begins between vectors"),
        (whole(c=20), "pixels begin between vectors"),
        (whole()[:, :, :, 1:], "rows are cut"),
        (whole()[:, :, ::2], "every second row"),
        (whole()[:, ::2], "every second channel"),
        (whole().contiguous(), "NCHW"),
        (torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16).expand(2, 8, 3, 5), "one value for all"),
        (whole()[0], "three dimensions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_pitch(found: torch.Tensor, what: str) -> None:
    assert alignment.pitch(found) == 0
