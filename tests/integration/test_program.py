"""``python -m ringstrategy`` runs a program as Python would, and the program's processes too."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest

import ringstrategy
from ringstrategy import one_flavour
from ringstrategy.program import Invocation, main, prepare
from ringstrategy.registration import register
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script, start_script

PYTHON = Path(sys.executable)
RUNNER = ("-m", "ringstrategy")


class Ended(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str


def _directly(words: list[str], folder: Path) -> Ended:
    """What Python makes of it."""
    done = subprocess.run([PYTHON, *words], cwd=folder, capture_output=True, text=True, check=False)
    status = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return Ended(status, done.stdout, re.sub(r'^.*File "<frozen runpy>".*\n', "", done.stderr, flags=re.MULTILINE))


def _by_us(folder: Path, *programs: list[str]) -> list[Ended]:
    """What we make of programs, each in a forked process."""
    (ended,) = run_ranks(_each, 1, programs, folder, init=False)
    return ended


def _each(rank: int, world_size: int, programs: tuple[list[str], ...], folder: Path) -> list[Ended]:
    ended = []
    for words in programs:
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            if (child := os.fork()) == 0:
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                os.chdir(folder)
                status = _status_of(words)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
            _, status = os.waitpid(child, 0)
            stdout.seek(0)
            stderr.seek(0)
            ended.append(Ended(os.waitstatus_to_exitcode(status), stdout.read(), stderr.read()))
    return ended


def _status_of(words: list[str]) -> int:
    """Run a program in this process; do with its end what the interpreter does."""
    try:
        main(words)
    except SystemExit as ending:
        if not isinstance(ending.code, int | None):
            print(ending.code, file=sys.stderr)
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException as error:
        from_main_on = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(from_main_on), from_main_on)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))


# -- as Python would -------------------------------------------------------------------------------------------------

LOOK = """
    import beside
    import sys

    class Thing:
        pass

    spec = __spec__ and __spec__.name
    print(__name__, __file__, spec, __package__, __cached__, type(__loader__).__name__, __builtins__)
    print(sys.argv, sys.path[0], sys.modules[Thing.__module__].Thing is Thing, beside.__file__)
"""


def test_a_program_sees_what_it_would_see(tmp_path: Path) -> None:
    _write(tmp_path, beside="", look=LOOK, inner__in____init__="", inner__in__look=LOOK, inner__in____main__=LOOK)
    _write(tmp_path, inner__in__beside="")
    (tmp_path / "link.py").symlink_to(tmp_path / "inner" / "look.py")
    scripts = [["look.py"], ["inner/look.py", "--flag", "-m", "x"], ["link.py"]]
    modules = [["-m", "inner.look", "a b"], ["-m", "inner"]]
    expected = [_directly(words, tmp_path) for words in scripts + modules]
    assert all(ended.status == 0 for ended in expected), expected
    assert _by_us(tmp_path, *scripts, *modules) == expected


ENDS = {
    "at its end": "",
    "with a number": "raise SystemExit(7)",
    "with a word": "import sys; sys.exit('no data')",
    "with nothing": "import sys; sys.exit()",
    "with an error": "def f():\n    return 1 / 0\nf()",
    "with a chain of errors": "try:\n    {}['x']\nexcept KeyError as e:\n    raise ValueError('no x') from e",
    "with a group of errors": "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])",
    "at an import": "import nothing.of_the_kind",
    "within an import": "import broken",
    "with a syntax error": "def f(:",
    "with an interrupt": "raise KeyboardInterrupt",
    "with a hook of its own": "import sys\nsys.excepthook = lambda kind, error, tb: print(kind, error)\n1 / 0",
}


def test_it_ends_as_it_would(tmp_path: Path) -> None:
    files = {how.replace(" ", "_"): text for how, text in ENDS.items()}
    _write(tmp_path, **files, broken="raise OSError('full')")
    _write(tmp_path / "inner", __init__="", **files)
    scripts = [[f"{name}.py"] for name in files]
    modules = [["-m", f"inner.{name}"] for name in files if "syntax" not in name]  # there Python shows its importer
    programs = scripts + modules
    ended = _by_us(tmp_path, *programs)
    for words, one in zip(programs, ended, strict=True):
        assert one == _directly(words, tmp_path), words


def test_an_error_of_the_package_around_a_module_is_its_own(tmp_path: Path) -> None:
    _write(tmp_path, inner__in____init__="raise OSError('full')", inner__in__look="")
    (ended,) = _by_us(tmp_path, ["-m", "inner.look"])
    assert ended.status == 1
    assert ended.stderr.splitlines()[1].strip() == f'File "{tmp_path}/inner/__init__.py", line 1, in <module>'
    assert ended.stderr.splitlines()[-1] == "OSError: full"


ABSENT = {
    "nothing.py": (2, "can't open file '{folder}/nothing.py': [Errno 2] No such file or directory"),
    "inner": (2, "can't open file '{folder}/inner': [Errno 21] Is a directory"),
    "-m nothing": (1, "No module named nothing"),
    "-m nothing.inside": (1, "No module named nothing.inside"),
    "-m inner.nothing": (1, "No module named inner.nothing"),
    "-m look.inside": (1, "No module named look.inside"),
    "-m inner": (1, "No module named inner.__main__; 'inner' is a package and cannot be directly executed"),
}


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    _write(tmp_path, look="", inner__in____init__="")
    ended = _by_us(tmp_path, *(words.split() for words in ABSENT))
    assert ended == [
        Ended(status, "", f"python -m ringstrategy: {message.format(folder=tmp_path)}\n")
        for status, message in ABSENT.values()
    ]


# -- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "name a script, or a module after -m"),
        (["-m"], 2, "name a script, or a module after -m"),
        (["--trainer.strategy", "ring_ddp", "train.py"], 2, "unrecognized arguments"),
        (["--set", "strategy", "train.py"], 2, "'strategy' is not of the form NAME=VALUE"),
        (["--set", "stratgy=ddp", "train.py"], 2, "the Trainer has no argument 'stratgy'; it has accelerator,"),
        (["--set", "devices=[1", "train.py"], 2, "'[1' is no YAML"),
        (["--help"], 0, "python -m ringstrategy -m package.train --strategy ring_ddp"),
    ],
)
def test_words_that_are_not_understood(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == status
    captured = capsys.readouterr()
    assert message in " ".join((captured.out + captured.err).split())


TRAINER = """
    import sys
    from lightning.pytorch import Trainer

    trainer = Trainer(strategy="auto", accelerator="gpu", devices=1, max_epochs=3, logger=False)
    chunks = getattr(trainer.strategy, "_chunks", None)
    print(type(trainer.strategy).__name__, trainer.num_devices, trainer.max_epochs, chunks, sys.argv)
"""
SET = [*("--set", "accelerator=cpu"), *("--set", "devices=2"), "--set=max_epochs=5"]
PIPELINE = "strategy={class_path: ringstrategy.PipelineStrategy, init_args: {chunks: 3}}"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("strategy=ring_ddp", "RingDDPStrategy 2 5 None"), (PIPELINE, "PipelineStrategy 2 5 3")],
    ids=["name", "class"],
)
def test_arguments_of_the_trainer_that_the_program_has_fixed(strategy: str, expected: str, tmp_path: Path) -> None:
    _write(tmp_path, train=TRAINER)
    (ended,) = _by_us(tmp_path, ["--set", strategy, *SET, "train.py", "--set", "x"])
    assert ended.status == 0
    assert f"{expected} ['train.py', '--set', 'x']" in ended.stdout


# -- the other package -----------------------------------------------------------------------------------------------


def _other_flavour(rank: int, world_size: int) -> None:
    one_flavour.install()
    one_flavour.install()
    assert sum(type(finder).__module__ == one_flavour.__name__ for finder in sys.meta_path) == 1
    fabric = importlib.import_module("lightning_fabric.utilities.seed")
    callbacks = importlib.import_module("pytorch_lightning.callbacks.early_stopping")
    other = importlib.import_module("pytorch_lightning")
    assert other is pl
    assert callbacks.EarlyStopping is pl.callbacks.EarlyStopping
    assert fabric.seed_everything is pl.seed_everything
    assert pl.__spec__ is not None
    assert pl.__spec__.name == "lightning.pytorch"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'pytorch_lightning\.nothing'"):
        importlib.import_module("pytorch_lightning.nothing")
    register()  # again, as by a reload
    strategy = other.Trainer(strategy="ring_ddp", accelerator="cpu", devices=2, logger=False).strategy
    assert type(strategy) is ringstrategy.RingDDPStrategy


def test_both_names_of_lightning_are_the_same_modules() -> None:
    run_ranks(_other_flavour, 1, init=False)


# -- processes -------------------------------------------------------------------------------------------------------

SCRIPT = Invocation("train.py", is_module=False, settings=("--set", "devices=2"))
MODULE = Invocation("package.train", is_module=True)


class _Hydra(NamedTuple):
    """Stands for Hydra, as far as Lightning's launcher asks it."""

    run: Any = types.SimpleNamespace(dir="outputs/1")

    @classmethod
    def get(cls) -> _Hydra:
        return cls()


def _hydra_modules(folder: str) -> dict[str, types.ModuleType]:
    hydra, core, config, utils = map(types.ModuleType, ("hydra", "core", "hydra_config", "utils"))
    vars(config)["HydraConfig"] = _Hydra
    vars(utils).update(get_original_cwd=lambda: folder, to_absolute_path=lambda path: f"{folder}/{path}")
    return {"hydra": hydra, "hydra.core": core, "hydra.core.hydra_config": config, "hydra.utils": utils}


def _commands(rank: int, world_size: int, invocation: Invocation) -> list[Any]:
    """How Lightning and Fabric would start another rank, without and with Hydra."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__spec__ = importlib.machinery.ModuleSpec("package.train", None) if invocation.is_module else None
    for _ in range(2):
        prepare(invocation)
    sys.argv = ["train.py", "--lr", "0.1"]
    os.chdir("/")  # as a program may have done since
    sys.modules.update(_hydra_modules("/original"))
    launchers = [
        importlib.import_module(f"lightning.{name}.strategies.launchers.subprocess_script")
        for name in ("pytorch", "fabric")
    ]
    return [
        found
        for launcher in launchers
        for found in (launcher._basic_subprocess_cmd(), launcher._hydra_subprocess_cmd(local_rank=1))
    ]


@pytest.mark.parametrize("invocation", [SCRIPT, MODULE], ids=["script", "module"])
def test_ranks_are_started_the_same_way(invocation: Invocation) -> None:
    (commands,) = run_ranks(_commands, 1, invocation, init=False)
    target = (
        ["-m", "package.train"] if invocation.is_module else ["--set", "devices=2", str(Path("train.py").resolve())]
    )
    command = [sys.executable, "-m", "ringstrategy", *target, "--lr", "0.1"]
    hydra = ['hydra.run.dir="outputs/1"', "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null"]
    assert commands == [command, ([*command, *hydra], "/original")] * 2


def _in_a_worker(rank: int, world_size: int, told: bytes) -> tuple[Any, ...]:
    pickle.loads(told)
    other = importlib.import_module("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", devices=1, logger=False)
    return other.__name__, trainer.num_devices, pickle.loads(spawn_data()).keys() >= {"ringstrategy"}


def _told(rank: int, world_size: int) -> bytes:
    prepare(Invocation("train.py", is_module=False, trainer={"devices": 2}))
    return spawn_data()


def spawn_data() -> bytes:
    """What a process of ``multiprocessing`` is told at its start."""
    return pickle.dumps(spawn.get_preparation_data("worker") | {"authkey": b""})  # which is pickled at no other time


def test_processes_of_multiprocessing_are_told() -> None:
    (told,) = run_ranks(_told, 1, init=False)
    assert run_ranks(_in_a_worker, 1, told, init=False) == [("lightning.pytorch", 2, True)]


TRAIN = """
    import sys
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def on_train_end(self):
            trainer = self.trainer
            said = f"{trainer.global_step} steps, {__name__}, {sys.argv[1:]}"
            print(f"rank {trainer.global_rank} of {trainer.world_size}: {said}\\n", end="")

    def run(strategy, then):
        limits = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
        trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=2, barebones=True, **limits)
        trainer.fit(Model())
        print(type(trainer.strategy).__name__)
        if then == "fail" and trainer.global_rank == 1:
            raise ValueError("late")

    if __name__ == "__main__":
        run(*sys.argv[1:])
"""


def _assert_two_ranks_ran(ended: Any, name: str, arguments: list[str]) -> None:
    assert ended.returncode == 0, ended
    assert not ended.leftover_pids, ended
    said = {f"rank {rank} of 2: 2 steps, {name}, {arguments}" for rank in range(2)}
    assert said <= set(ended.stdout.splitlines()), ended
    assert "RingDDPStrategy" in ended.stdout, ended


@pytest.mark.slow
def test_a_script_and_the_ranks_it_starts(tmp_path: Path) -> None:
    _write(tmp_path, train=TRAIN)
    ended = run_script(PYTHON, *RUNNER, "train.py", "ring_ddp", "go", timeout=100.0, cwd=tmp_path)
    _assert_two_ranks_ran(ended, "__main__", ["ring_ddp", "go"])


@pytest.mark.slow
def test_a_module_and_the_ranks_it_starts(tmp_path: Path) -> None:
    _write(tmp_path, inner__in____init__="", inner__in__train=TRAIN)
    ended = run_script(PYTHON, *RUNNER, "-m", "inner.train", "ring_ddp", "go", timeout=100.0, cwd=tmp_path)
    _assert_two_ranks_ran(ended, "__main__", ["ring_ddp", "go"])


@pytest.mark.slow
def test_workers_that_are_spawned(tmp_path: Path) -> None:
    """They import the program before they learn of anything else."""
    _write(tmp_path, train=TRAIN)
    ended = run_script(PYTHON, *RUNNER, "train.py", "ring_ddp_spawn", "go", timeout=100.0, cwd=tmp_path)
    _assert_two_ranks_ran(ended, "__mp_main__", ["ring_ddp_spawn", "go"])


@pytest.mark.slow
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    _write(tmp_path, train=TRAIN)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = run_script(PYTHON, *torchrun, *RUNNER, "train.py", "ring_ddp", "go", timeout=100.0, cwd=tmp_path)
    _assert_two_ranks_ran(ended, "__main__", ["ring_ddp", "go"])


@pytest.mark.slow
def test_a_rank_that_fails_after_training_fails_the_program(tmp_path: Path) -> None:
    _write(tmp_path, train=TRAIN)
    ended = run_script(PYTHON, *RUNNER, "train.py", "ring_ddp", "fail", timeout=100.0, cwd=tmp_path)
    assert ended.returncode == 1, ended
    assert not ended.leftover_pids, ended
    frames = re.findall(r'^\[rank1\]:   File "(.*)", line', ended.stderr, re.MULTILINE)
    assert frames == [str(tmp_path / "train.py")] * 2, ended


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], list(RUNNER)], ids=["directly", "by us"])
def test_an_interrupt_ends_it_as_python_does(words: list[str], tmp_path: Path) -> None:
    _write(tmp_path, waits="import time; print('ready', flush=True); time.sleep(60)")
    with start_script(PYTHON, *words, "waits.py", cwd=tmp_path) as running:
        running.wait_for("ready")
        running.send_signal(signal.SIGINT)
        ended = running.finish(timeout=20.0)
    assert ended.returncode == -signal.SIGINT, ended
    assert ended.stderr.splitlines()[1].strip() == f'File "{tmp_path}/waits.py", line 1, in <module>', ended
