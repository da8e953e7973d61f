"""The benchmark page: up to date, and true to the rows."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from advisor.bench import models, op_rows
from advisor.ops import sources
from advisor.resources import kernels_dir
from benchmark_pages import page

FOLDER = kernels_dir().parent / "docs" / "benchmarks"
MACHINE = f"some-gpu/{page.PAGE}"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkout: the results are not part of the distribution")
def test_the_page_and_its_plots_are_up_to_date() -> None:
    """`python tools/benchmark_pages`"""
    made = page.files(FOLDER)
    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in made} == made
    assert {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.svg")} == {
        n for n in made if n.endswith(".svg")
    }
    for name in made:
        folder, _, file = name.rpartition("/")
        if folder:
            assert f"]({file})" in made[f"{folder}/{page.PAGE}"] or f"]({name})" in made[page.PAGE], name


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkout: the results are not part of the distribution")
def test_what_is_stale_or_gone_is_written_anew(tmp_path: Path) -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    copied = shutil.copytree(FOLDER, tmp_path / "docs" / "benchmarks")
    (tmp_path / "README.md").write_text(readme.replace("| resnet50_b256 | ", "| resnet50_b256 | 1"), encoding="utf-8")
    (copied / page.PAGE).write_text("stale", encoding="utf-8")
    (copied / page.SHOWN / "trainings.svg").unlink()
    page.write(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme
    for name in (page.PAGE, f"{page.SHOWN}/trainings.svg"):
        assert (copied / name).read_bytes() == (FOLDER / name).read_bytes(), name


# docs/benchmarks of the issue: what each row of either file says, whatever else it says.
FIELDS = (
    "name", "pass", "shape", "dtype", "layout", "advisor_ms", "eager_ms", "compile_ms", "limit_ms", "spread", "n", "error",
    "baseline_error", "kernel_sha", "torch", "date",
)  # fmt: skip


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkout: the results are not part of the distribution")
@pytest.mark.parametrize(("kind", "row_type"), [("ops", op_rows.OpRow), ("models", models.ModelRow)])
def test_rows_on_file_are_what_the_benchmarks_write(kind: str, row_type: type) -> None:
    names = {field.name.removesuffix("_") for field in dataclasses.fields(row_type)}
    for file in FOLDER.glob(f"*/{kind}.json"):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            assert set(FIELDS) <= set(row) <= names, row["name"]


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkout: the results are not part of the distribution")
def test_the_readme_shows_the_trainings_on_file() -> None:
    """`python tools/benchmark_pages`"""
    document = json.loads((FOLDER / page.SHOWN / "models.json").read_text(encoding="utf-8"))
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert page.trainings(document) in readme
    assert page.with_trainings(readme, document) == readme
    assert page.with_trainings(readme.replace("| resnet50_b256 | ", "| resnet50_b256 | 1"), document) == readme


def row(**change: object) -> dict[str, object]:
    return {
        "name": "bn+relu", "pass": "forward", "shape": [256, 64, 112, 112], "dtype": "bfloat16", "layout": "nhwc",
        "advisor_ms": 0.5, "eager_ms": 0.4, "compile_ms": None, "limit_ms": 0.35, "spread": 0.012, "eager_spread": 0.0,
        "advisor_host_us": 41.6, "eager_host_us": 38.0,
        "n": 25, "error": 1.5e-3, "baseline_error": 1.6e-3, "kernel_sha": "", "torch": "2.11", "date": "2026-01-02", **change,
    }  # fmt: skip


def test_losses_are_shown_and_what_is_missing_is_said(tmp_path: Path) -> None:
    machine = tmp_path / "some-gpu"
    machine.mkdir()
    document = {
        "gpu": "Some GPU",
        "cuda": "13.0",
        "copy_gbps": 4000.0,
        "rows": [row(), row(**{"pass": "backward"}, compile_ms=1.0, advisor_peak_bytes=3, eager_peak_bytes=4)],
    }
    (machine / "ops.json").write_text(json.dumps(document))
    files = page.files(tmp_path)
    text = files[MACHINE]
    assert text.startswith("# Some GPU")
    assert "| [Some GPU](some-gpu/README.md) | 0 | 2 | 1 | 0 | 0.80 (0.80 to 0.80) | 4,000 |" in files[page.PAGE]
    assert "| bn+relu | 256×64×112×112 | bfloat16 | forward | 0.5000 | 0.70 | ███████··· | 0.80 | – | 1.2% |" in text
    assert "| 0.80 | 2.00 |" in text
    rows = text[text.index("### batchnorm_act") :].splitlines()
    assert [line.split("|")[-4].strip() for line in rows if line.startswith("| bn")] == ["–", "0.75"]
    assert "| +4 | yes |" in text
    assert (
        "| [batchnorm_act](#batchnorm_act) | forward | 1 | 0.70 (0.70 to 0.70) | ███████··· | 0.80 (0.80 to 0.80) | – | 1 of 1 |"
        in text
    )
    missing = text[text.index("Not measured: ") :]
    assert "bn bfloat16 256×64×112×112, " in missing
    assert "bn+relu bfloat16 256×64×112×112" not in missing
    (alone,) = page.files(tmp_path / "some-gpu").items()  # a folder without machines
    assert alone[0] == page.PAGE
    assert f"/{page.PAGE})" not in alone[1]


def test_the_summary_ranges_over_large_dispatched_cases_and_counts_what_is_left_to_pytorch() -> None:
    small = row(shape=[128, 64, 32, 32], advisor_ms=0.1, eager_ms=0.2, limit_ms=0.04)
    rows = [row(), row(advisor_ms=0.4, name="bn+add+relu"), row(name="bn", advisor_ms=0.01), small]
    family, cases = next(found for found in page.measured_families(rows) if found[0].id == "batchnorm_act")
    cases = [
        (dataclasses.replace(case, wins=lambda lost=case.name == "bn": "loses" if lost else ""), found)
        for case, found in cases
    ]
    expected = "| forward | 2 | 0.79 (0.70 to 0.87) | ████████·· | 0.90 (0.80 to 1.00) | – | 3 of 4 |"
    assert expected in page.summary([(family, cases)])


def test_a_training_says_whether_the_kernels_have_changed_since(tmp_path: Path) -> None:
    machine = tmp_path / "some-gpu"
    machine.mkdir()
    now = {name: sources.sha256(name) for name in sources.all_names()}
    training = {
        "name": "net", "plain_images_per_s": 100.0, "advisor_images_per_s": 300.0, "speedup": 3.0, "speedup_low": 2.9,
        "speedup_high": 3.1, "kept": ["channels_last", "first_conv"], "plain_ms": 12.0, "eager_ms": 6.0, "compile_ms": None,
        "advisor_ms": 4.0, "limit_ms": 2.5, "apply_s": 61.0, "kernel_sha": now,
    }  # fmt: skip
    unused, older = (
        {**training, "kernel_sha": {**now, name: "0" * 64}}
        for name in ("grouped/grouped_forward.cu", "first_conv/first_conv_forward.cu")
    )
    launched = {**older, "launched": ["first_conv/first_conv_backward_weight.cu"]}  # what changed did not run
    ran = {**launched, "launched": ["first_conv/first_conv_forward.cu"]}
    again = {**training, "searched": "2026-11-01"}
    document = {
        "gpu": "Some GPU",
        "cuda": "13.0",
        "torch": "2.11",
        "rows": [training, unused, older, launched, ran, again],
    }
    (machine / "models.json").write_text(json.dumps(document))
    rows = [line for line in page.files(tmp_path)[MACHINE].splitlines() if line.startswith("| net")]
    assert [line.split("|")[-2].strip() for line in rows] == ["as now", "as now", "older", "as now", "older", "as now"]
    assert "| 61 s, 2026-11-01 |" in rows[-1]
    assert rows[0].startswith(
        "| net | 100 | 200 | – | 300 | 3.00 (2.90 to 3.10) | channels_last, first_conv | 12.00 | 6.00 | – | 4.00 | 2.50 | 61 s |"
    )
    assert "| net | 100 | 200 | 300 | 3.0 × |" in page.trainings(document)  # no column of what nobody measured


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ((None, None), "None has compiled code beside it: they are of `advisor bench ops --baseline eager`."),
        (
            (None, 1.0),
            "1 have compiled code beside them, 1 of them of what is dispatched: there it is faster than ours in 0.",
        ),
        (
            (0.4, 1.0),
            "All have compiled code beside them, 2 of them of what is dispatched: there it is faster than ours in 1.",
        ),
    ],
)
def test_whether_there_is_compiled_code_beside_is_what_the_rows_say(
    tmp_path: Path, times: tuple[float | None, float | None], words: str
) -> None:
    rows = [row(**{"pass": way}, compile_ms=time) for way, time in zip(("forward", "backward"), times, strict=True)]
    (tmp_path / "some-gpu").mkdir()
    document = {"gpu": "Some GPU", "cuda": "13.0", "copy_gbps": 4000.0, "rows": rows}
    (tmp_path / "some-gpu" / "ops.json").write_text(json.dumps(document))
    text = page.files(tmp_path)[MACHINE]
    assert f"2026-01-02. {words}\n" in text
    assert text.count("compiled code beside") == 1  # and nothing else speaks of it
    ratio = "2.00 (2.00 to 2.00)" if times[1] else "–"
    assert f"| {ratio} | 1 of 1 |" in text


@pytest.mark.parametrize(("share", "expected"), [(0.0, "··········"), (0.93, "█████████·"), (1.3, "██████████")])
def test_bar(share: float, expected: str) -> None:
    assert page.bar(share) == expected
