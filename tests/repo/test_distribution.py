"""What is built and installed is whole: the wheel, the sdist and an editable install all find their data."""

from __future__ import annotations

import re
import site
import sysconfig
import zipfile
from pathlib import Path

import pytest
import yaml
from installed import install, run

from advisor.resources import kernels_dir, rules_dir

REPO = Path(__file__).resolve().parents[2]
DATA = {"kernels": ("_kernels", kernels_dir()), "rules": ("_rules", rules_dir())}


def listed_packages() -> set[str]:
    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^packages = \[\n(\s+\".*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block
    return set(yaml.safe_load("[" + block[1] + "]"))


def test_every_package_of_the_tree_is_listed() -> None:
    """`advisor.profiling.bootstrap` has no __init__.py: it is put on the path as a folder, not imported from."""
    folders = {path.parent for path in (REPO / "advisor").rglob("*.py")}
    tree = {".".join(folder.relative_to(REPO).parts) for folder in folders}
    assert listed_packages() == tree | {"advisor._kernels", "advisor._rules"}


def environment_with(what: Path, folder: Path, *options: str) -> Path:
    """A fresh environment holding `what` alone; its dependencies come from the one the tests run in. Its bin folder."""
    scripts, packages = install(what, folder, *options)
    # A plain path line: the site folder's own .pth files, with the tests' editable install, are not read for it.
    borrowed = sorted({*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (packages / "zz-borrowed.pth").write_text("\n".join(borrowed) + "\n", encoding="utf-8")
    return scripts


def check_installed(scripts: Path, cwd: Path, *, origin: Path) -> None:
    cwd.mkdir()
    found = run(scripts / "python", "-c", "import advisor; print(advisor.__file__)", cwd=cwd).strip()
    assert Path(found).is_relative_to(origin)
    rules = run(scripts / "advisor", "rules", "list", cwd=cwd)
    shipped = [path for path in rules_dir().rglob("*.yaml") if not path.name.endswith(".cases.yaml")]
    assert [path.stem for path in shipped if path.stem not in rules] == []
    kernels = run(scripts / "python", "-m", "advisor", "kernels", "list", cwd=cwd)
    assert [path.name for path in kernels_dir().rglob("*.cu") if path.stem not in kernels] == []
    # The entry point: pytest finds the plugin without being told, and `-p no:advisor` leaves it out.
    pytest_run = (scripts / "python", "-m", "pytest", "-p", "no:cacheprovider", "--markers")
    assert "@pytest.mark.perf(max_step_ms" in run(*pytest_run, cwd=cwd)
    assert "@pytest.mark.perf(" not in run(*pytest_run, "-p", "no:advisor", cwd=cwd)
    session = "from advisor.resources import BOOTSTRAP; print((BOOTSTRAP / 'sitecustomize.py').is_file())"
    assert run(scripts / "python", "-c", session, cwd=cwd).strip() == "True"


def test_files_that_name_the_version_and_the_license_agree() -> None:
    from advisor import __version__

    text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text(encoding="utf-8"))
    assert f'version = "{__version__}"' in text
    assert citation["version"] == __version__
    assert f'license = "{citation["license"]}"' in text
    assert "Apache License" in (REPO / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_carries_every_data_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name, (inside, folder) in DATA.items():
        files = run("git", "ls-files", "-co", "--exclude-standard", name, cwd=REPO).splitlines()
        assert files
        wanted = {f"advisor/{inside}/{(REPO / file).relative_to(folder).as_posix()}" for file in files}
        assert sorted(wanted - held) == []
    assert {"advisor/py.typed", "advisor/profiling/bootstrap/sitecustomize.py"} <= held
    templates = {
        f"advisor/reporting/templates/{path.name}" for path in (REPO / "advisor/reporting/templates").iterdir()
    }
    assert sorted(templates - held) == []
    assert [name for name in held if name.endswith(".dist-info/licenses/LICENSE")]
    assert not [name for name in held if name.startswith(("tests", "tools", "kernels", "rules", "docs"))]


@pytest.mark.long
def test_a_wheel_made_from_the_sdist_finds_its_data(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    check_installed(environment_with(wheel, tmp_path / "env"), tmp_path / "elsewhere", origin=tmp_path / "env")


@pytest.mark.slow
def test_the_sdist_installs_and_finds_its_data(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    check_installed(environment_with(sdist, tmp_path / "env"), tmp_path / "elsewhere", origin=tmp_path / "env")


@pytest.mark.slow
def test_an_editable_install_finds_its_data(source: Path, tmp_path: Path) -> None:
    scripts = environment_with(source, tmp_path / "env", "--editable")
    check_installed(scripts, tmp_path / "elsewhere", origin=source)
