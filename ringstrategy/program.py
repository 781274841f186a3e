"""``python -m ringstrategy train.py ...``: an existing program, unedited, with the strategies' names registered.

The program sees what it would see without us: ``__main__``, ``__file__``, ``sys.argv``, ``sys.path``, exit codes and
tracebacks are its own. What differs:

- The names of the strategies are there, and ``pytorch_lightning`` is ``lightning.pytorch``.
- The processes of launchers start the same way, and so do those of ``multiprocessing``.
- ``--set`` decides arguments of the Trainer that the program has fixed.
- torch and Lightning are imported before the program's first line.
"""

from __future__ import annotations

import argparse
import builtins
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import spawn
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

import lightning.pytorch as pl
import yaml  # type: ignore[import-untyped]

from ringstrategy import _lightning, one_flavour

__all__ = ["Invocation", "main"]

_COMMAND = ("-m", "ringstrategy")
_NAME = "__main__"


@dataclass(frozen=True)
class Invocation:
    """What to run, and how.

    Attributes:
        target: the script, or the dotted name of a module.
        is_module: which of both it is.
        arguments: the program's own words.
        trainer: arguments for every Trainer that the program makes, whatever it says itself.
        settings: the words that say so, as they were given.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()


def main(words: Sequence[str]) -> None:
    """Run a program in this process, as ``__main__``.

    Args:
        words: those after ``python -m ringstrategy``.

    Raises:
        SystemExit: the program ends so; or 2 for words that make no sense or a script that cannot be read, 1 for a
            module that is not there.
    """
    invocation = _parse(words)
    prepare(invocation)
    try:
        module, code = _load_module(invocation) if invocation.is_module else _load_script(invocation)
        name = str(module.__file__) if invocation.is_module else invocation.target  # the interpreter does so, too
        sys.argv[:] = [name, *invocation.arguments]
        sys.modules[_NAME] = module
        exec(code, module.__dict__)
    except BaseException:
        _show_as_its_own()
        raise


def prepare(invocation: Invocation) -> None:
    """Make this process what its program needs, and the processes that it will start likewise. Idempotent.

    Args:
        invocation: of the program.
    """
    target = invocation.target if invocation.is_module else os.path.abspath(invocation.target)
    words = ["-m", target] if invocation.is_module else [target]
    one_flavour.install()
    _lightning.relaunch_with([*_COMMAND, *invocation.settings, *words])
    if not isinstance(spawn.get_preparation_data, _PreparationData):
        found_from_anywhere = replace(invocation, target=target)
        spawn.get_preparation_data = _PreparationData(spawn.get_preparation_data, found_from_anywhere)
        _decide(invocation.trainer)


# -- words of the command line ---------------------------------------------------------------------------------------


def _parse(words: Sequence[str]) -> Invocation:
    parser = argparse.ArgumentParser(
        prog=f"python {' '.join(_COMMAND)}",
        usage="%(prog)s [-h] [--set NAME=VALUE ...] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a program that trains with Lightning as it is, with the names of the strategies registered.",
        epilog=textwrap.dedent(
            """\
            examples:
              python -m ringstrategy train.py fit --trainer.strategy ring_ddp --trainer.devices 2
              python -m ringstrategy -m package.train --strategy ring_ddp
              python -m ringstrategy --set strategy=ring_ddp --set devices=2 train.py
              torchrun --nproc-per-node 2 -m ringstrategy train.py

            Recipes, plans and benchmarks have a command of their own: ringstrategy --help
            """
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="an argument of every Trainer, whatever the program says; VALUE is YAML",
    )
    parser.add_argument("-m", metavar="MODULE", help="run a module, as `python -m` does")
    settings, program = _split(words)
    options = parser.parse_args(settings)
    is_module = bool(program) and program[0].startswith("-m")
    if is_module:  # -m MODULE, or -mMODULE
        program = program[1:] if program[0] == "-m" else [program[0].removeprefix("-m"), *program[1:]]
    if not program:
        parser.error("name a script, or a module after -m")
    target, *arguments = program
    return Invocation(target, is_module, tuple(arguments), dict(options.set), tuple(settings))


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for us, and those from the script, or from ``-m``, on."""
    at = 0
    while at < len(words) and words[at].startswith("-") and not words[at].startswith("-m"):
        at += 2 if words[at] == "--set" else 1
    return list(words[:at]), list(words[at:])


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    known = inspect.signature(pl.Trainer.__init__).parameters.keys() - {"self"}
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    if name not in known:
        raise argparse.ArgumentTypeError(f"the Trainer has no argument {name!r}; it has {', '.join(sorted(known))}")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{value!r} is no YAML: {error}") from None


# -- the program -----------------------------------------------------------------------------------------------------


def _load_script(invocation: Invocation) -> tuple[ModuleType, CodeType]:
    script = os.path.abspath(invocation.target)
    try:
        with io.open_code(script) as file:
            source = file.read()
    except OSError as error:
        _fail(f"can't open file {script!r}: [Errno {error.errno}] {error.strerror}", status=2)
    _import_from(os.path.dirname(os.path.realpath(script)))
    module = _main_module(__file__=script, __loader__=importlib.machinery.SourceFileLoader(_NAME, script))
    return module, compile(source, script, "exec", dont_inherit=True)


def _load_module(invocation: Invocation) -> tuple[ModuleType, CodeType]:
    _import_from(os.getcwd())
    name = invocation.target
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        inside = _find(f"{name}.__main__")
        if inside is None:
            _fail(f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed", status=1)
        spec = inside
    if spec is None:
        _fail(f"No module named {name}", status=1)
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if code is None:
        _fail(f"No code object available for {spec.name}", status=1)
    return _main_module(
        __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached
    ), code


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module is. Imports the packages around it, whose errors are the program's own."""
    package = name.rpartition(".")[0]
    if package and _find(package) is None:
        return None
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _main_module(**attributes: Any) -> ModuleType:
    module = ModuleType(_NAME)
    defaults = {"__builtins__": builtins, "__spec__": None, "__package__": None, "__cached__": None}
    module.__dict__.update(defaults | attributes)
    return module


def _import_from(folder: str) -> None:
    """Where the interpreter has put our own folder on the path, put the program's."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _fail(message: str, status: int) -> NoReturn:
    print(f"python {' '.join(_COMMAND)}: {message}", file=sys.stderr)
    raise SystemExit(status)


def _show_as_its_own() -> None:
    """Show the exception that is about to leave this process without the frames that lead to the program."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        sys.last_traceback = own = _own(traceback)
        shown_by(kind, error.with_traceback(own), own)

    sys.excepthook = show


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's first frame on."""
    ours = (__file__, str(Path(__file__).with_name("__main__.py")), "<frozen ")  # what is frozen runs and imports
    while traceback is not None and traceback.tb_frame.f_code.co_filename.startswith(ours):
        traceback = traceback.tb_next
    return traceback


# -- its Trainers, and the processes that it starts ------------------------------------------------------------------


def _decide(arguments: Mapping[str, Any]) -> None:
    """Have every Trainer take these arguments."""
    if not arguments:
        return
    init = pl.Trainer.__init__

    @functools.wraps(init)
    def decided(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, **{name: _build(value) for name, value in arguments.items()}})

    pl.Trainer.__init__ = decided  # type: ignore[method-assign]


def _build(value: Any) -> Any:
    """A value of YAML, or the object that it describes, as LightningCLI does."""
    if not (isinstance(value, dict) and "class_path" in value):
        return value
    from lightning.pytorch.cli import instantiate_class  # not cheap

    return instantiate_class((), value)


class _PreparationData:
    """What a process of ``multiprocessing`` is told before it imports the program: here, also how it was started.

    Args:
        original: the function of ``multiprocessing.spawn`` in whose place this stands.
        invocation: of the program.
    """

    def __init__(self, original: Any, invocation: Invocation) -> None:
        self._original = original
        self._invocation = invocation

    def __call__(self, name: str) -> dict[str, Any]:
        return {**self._original(name), "ringstrategy": _Prepared(self._invocation)}


class _Prepared:
    """Is unpickled by the new process first of all."""

    def __init__(self, invocation: Invocation) -> None:
        self._invocation = invocation

    def __reduce__(self) -> tuple[Any, ...]:
        return prepare, (self._invocation,)
