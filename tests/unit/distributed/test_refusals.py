"""What a script's text says against dividing its batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.distributed import refusals


@pytest.mark.parametrize(
    "line",
    [
        "logits = z @ z.t()",
        "logits = torch.mm(features, features.T)",
        "d = torch.cdist(z, z)",
        "s = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2)",
        "mixed = lam * images + (1 - lam) * images[torch.randperm(images.size(0))]",
        "x = lam * x + (1 - lam) * x.flip(0)",
        "loss = F.cross_entropy(logits, y, reduction='sum')",
        "from pytorch_metric_learning import losses",
        "from torchvision.transforms.v2 import CutMix",
        "mix = v2.MixUp(num_classes=10)",
        "criterion = SupConLoss(temperature=0.1)",
        "loss = nt_xent(a, b)",
        "logits = image_features @ text_features.t()",
        "s = torch.einsum('nc,mc->nm', z, z)",
        "s = torch.einsum('ic,jc->ij', z_i, z_j)",
    ],
)
def test_what_sees_more_of_a_batch_than_one_sample_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    (found,) = refusals.read(script)
    assert found.line == f"{script}:2"


@pytest.mark.parametrize(
    "line",
    [
        "y = x @ self.weight.t()",
        "gram = f.bmm(f.transpose(1, 2))",
        "images = images.flip(3)",
        "order = torch.randperm(len(dataset))",
        "data = dataset[torch.randperm(9)]",
        "loss = F.cross_entropy(logits, y, reduction='mean')",
        "y = features @ weight.t()",
        "s = torch.einsum('bchw,dc->bdhw', x, w)",
        "s = torch.einsum('nc,nc->n', z, z)",
        "train, val = indices[torch.randperm(9)], 0",
        "loss = nn.TripletMarginLoss()(anchor, positive, negative)",
    ],
)
def test_what_looks_like_it_is_let_be(tmp_path: Path, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\n{line}\n")
    assert refusals.read(script) == [] or "dataset" in line


def test_mixup_as_its_authors_wrote_it_is_told(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "index = torch.randperm(x.size(0)).cuda()\n"
        "mixed_x = lam * x + (1 - lam) * x[index, :]\n"
        "y_a, y_b = y, y[index]\n"
        "part = order[index]\n"
    )
    assert [refusal.line for refusal in refusals.read(script)] == [f"{script}:2", f"{script}:3"]


def test_modules_beside_the_script_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import losses\nfrom models import net\n")
    (tmp_path / "losses.py").write_text("def contrastive(z):\n    return z @ z.T\n")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("from losses import contrastive\n")
    assert [refusal.line for refusal in refusals.read(tmp_path / "train.py")] == [f"{tmp_path / 'losses.py'}:2"]


def test_what_cannot_be_read_is_left_to_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def (\n")
    assert refusals.read(tmp_path / "train.py") == refusals.read(tmp_path / "none.py") == []
