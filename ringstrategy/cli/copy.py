"""``ringstrategy copy NAME DIR``: a recipe as a project of one's own."""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ringstrategy.cli.recipes import add_recipes_to_path, recipes_folder

__all__ = ["add_parser", "copy_recipe"]

_SCRIPTS = ("train", "predict")
_README = """# {name}

{summary}; data: {data}.

```console
python train.py                              # trains with config.yaml, tests the best checkpoint, sums up
python train.py --trainer.max_epochs 5       # any argument of LightningCLI goes before what config.yaml says
python train.py --help
python predict.py runs/{name}/version_0/checkpoints/*.ckpt PICTURE.png --plot sheet.png
torchrun --nproc-per-node {ranks} train.py        # the same with ranks that torchrun starts
```

Needs `ringstrategy[recipes]`. Every setting is in `config.yaml`; a run writes into `runs/{name}/version_N`.

{files}

Data of your own: a LightningDataModule with batches of images (N, C, H, W) and labels (N,), named as `data.class_path`
in `config.yaml`. A model of your own: change `networks.py`, or put your LightningModule into `train.py`.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add ``copy`` to the command line.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers()`` returned.
    """
    parser = subparsers.add_parser(
        "copy",
        help="make a recipe a project of your own",
        description="Write a recipe into a new folder: the script, what it imports, its config and a README. It runs at"
        " once with `python train.py` there, and nothing of it is read from the package any more.",
        epilog="example: ringstrategy copy digits my-digits && cd my-digits && python train.py",
    )
    parser.add_argument("name", metavar="NAME", help="the recipe")
    parser.add_argument("folder", metavar="DIR", type=Path, help="the new folder; it may exist if it is empty")
    parser.set_defaults(func=_copy)


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Write a recipe into a folder of its own.

    Args:
        name: of the recipe.
        folder: is made if it is not there.

    Returns:
        The files, by name.

    Raises:
        KeyError: there is no such recipe.
        FileExistsError: there is something in the folder.
    """
    add_recipes_to_path()
    from registry import find_recipe

    recipe = find_recipe(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder.resolve()} is there already and not empty; name a new folder")
    source = recipes_folder()
    config = recipe.config.read_text()
    modules = _needed([*_SCRIPTS, *re.findall(r"class_path: (\w+)\.", config)], source)
    folder.mkdir(parents=True, exist_ok=True)
    for module in modules:
        shutil.copy(source / f"{module}.py", folder)
    own = config.replace(f"ringstrategy run {name}", "python train.py").replace(
        f"-m ringstrategy.cli.main\n#  run {name}", "train.py\n# "
    )
    (folder / "config.yaml").write_text(own)
    files = "\n".join(f"- `{module}.py`: {_summary(source / f'{module}.py')}" for module in modules)
    summary = recipe.summary[0].upper() + recipe.summary[1:]
    (folder / "README.md").write_text(
        _README.format(name=name, summary=summary, data=recipe.data, ranks=recipe.ranks, files=files)
    )
    return sorted(folder.iterdir())


def _needed(roots: Iterable[str], source: Path) -> list[str]:
    """Modules of the recipes' folder that these are, and all that they import of it, in the order of their names."""
    found: set[str] = set()
    rest = list(roots)
    while rest:
        module = rest.pop()
        path = source / f"{module}.py"
        if module in found or not path.is_file():
            continue
        found.add(module)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                rest += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                rest.append(node.module or "")
    return sorted(found)


def _summary(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.partition("\n\n")[0].split())
    return line[0].lower() + line[1:]


def _copy(args: argparse.Namespace) -> int:
    try:
        files = copy_recipe(args.name, args.folder)
    except LookupError as error:
        print(f"ringstrategy copy: {error.args[0]}", file=sys.stderr)
        return 2
    print(f"{args.folder}: {', '.join(path.name for path in files)}")
    print(f"cd {args.folder} && python train.py")
    return 0
