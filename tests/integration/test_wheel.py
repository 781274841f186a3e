"""The wheel holds everything a user needs, and nothing that would be in another package's way."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.helpers.scripts import Completed, run_script

ROOT = Path(__file__).resolve().parents[2]
# The same as the installed command, after a look at where the package came from.
COMMAND = """
import sys
from pathlib import Path
import ringstrategy
from ringstrategy.cli.main import main
if __name__ == "__main__":
    print("package:", Path(ringstrategy.__file__).parent)
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    _python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel has been installed."""
    folder = tmp_path_factory.mktemp("site")
    _python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return folder


def _python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _command(site: Path, folder: Path, *arguments: str) -> Completed:
    ended = run_script(COMMAND, *arguments, cwd=folder, env={"PYTHONPATH": str(site)}, timeout=100.0)
    assert ended.returncode == 0, ended
    assert f"package: {site / 'ringstrategy'}\n" in ended.stdout
    return ended


def test_the_wheel_has_one_package_with_the_recipes_inside(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    roots = {name.split("/")[0] for name in names}
    assert "ringstrategy" in roots
    assert all(root == "ringstrategy" or root.endswith(".dist-info") for root in roots), roots
    assert not any("__pycache__" in name for name in names)
    tracked = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in {".py", ".yaml", ".md"}]
    assert {f"ringstrategy/recipes/{path.relative_to(ROOT / 'recipes')}" for path in tracked} <= set(names)
    assert "ringstrategy/py.typed" in names


def test_the_extras_name_what_the_recipes_import(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    text = archive.read(metadata).decode()
    for requirement in ("torchvision", "torchmetrics", "scikit-learn", "tensorboard", "jsonargparse"):
        assert any(
            line.startswith(f"Requires-Dist: {requirement}") and "extra == 'recipes'" in line
            for line in text.splitlines()
        ), requirement


def test_an_installed_package_lists_its_recipes(site: Path, tmp_path: Path) -> None:
    assert "digits" in _command(site, tmp_path, "recipes").stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_installed_package_trains_predicts_and_copies_in_an_empty_folder(site: Path, tmp_path: Path) -> None:
    limits = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
    _command(site, tmp_path, "run", "digits", "--trainer.max_epochs=1", *limits)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    summary = json.loads((tmp_path / "runs" / "digits" / "version_0" / "summary.json").read_text())
    assert summary["ranks"] == 2
    assert Path(summary["checkpoint"]).is_file()

    logs = tmp_path / "runs" / "digits" / "version_0"
    pictures = ["predict", summary["checkpoint"], str(logs / "confusion.png")]  # any picture has some class
    assert "%" in _command(site, tmp_path, *pictures, "--plot", "sheet.png").stdout
    assert (tmp_path / "sheet.png").is_file()

    _command(site, tmp_path, "copy", "digits", "project")
    project = tmp_path / "project"
    copied = [*limits, "--trainer.max_epochs=1"]
    ended = run_script(project / "train.py", *copied, cwd=project, env={"PYTHONPATH": str(site)}, timeout=100.0)
    assert ended.returncode == 0, ended
    assert (project / "runs" / "digits" / "version_0" / "summary.json").is_file()


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < 500_000
