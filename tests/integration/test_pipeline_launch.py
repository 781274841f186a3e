"""Pipelines in every way to launch, also over hosts that share no memory: the same bits come out."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Literal

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.cli import LightningCLI

from ringstrategy import PipelineStrategy
from ringstrategy.collectives.choose import Transport
from tests.helpers import launch_script
from tests.helpers.launch_script import WORLD_SIZE, Sharded, Used, digest
from tests.helpers.launches import COMMAND_LINE, SCRIPT, assert_clean, parameters_in, parameters_of, torchrun, used_in
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script, start_script
from tests.helpers.trainers import trainer_on_rank

NAMES: dict[str, Literal["gpipe", "1f1b"]] = {"gpipe": "gpipe", "pipeline_1f1b": "1f1b"}
START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}

# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", START_METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_schedule_and_start_method(name: str, suffix: str) -> None:
    strategy = pl.Trainer(accelerator="cpu", devices=2, strategy=name + suffix, logger=False).strategy
    assert type(strategy) is PipelineStrategy
    assert (strategy._schedule, strategy._start_method) == (NAMES[name], START_METHODS[suffix])


@pytest.mark.parametrize(("rank", "device"), [(0, 4), (1, 2)])
def test_stages_are_placed_in_the_order_of_the_devices(monkeypatch: pytest.MonkeyPatch, rank: int, device: int) -> None:
    """Symptom: devices=[4, 2] is sorted, or read as a set."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for module in ("lightning.pytorch.accelerators.cuda", "lightning.fabric.accelerators.cuda"):
        monkeypatch.setattr(f"{module}.num_cuda_devices", lambda: 8)
    monkeypatch.setattr("lightning.pytorch.accelerators.CUDAAccelerator.is_available", lambda: True)
    environment = TorchElasticEnvironment()
    trainer = pl.Trainer(accelerator="cuda", devices=[4, 2], strategy="gpipe", plugins=[environment], logger=False)
    strategy = trainer.strategy
    assert isinstance(strategy, PipelineStrategy)
    assert strategy.root_device == torch.device("cuda", device)
    assert strategy.stage == rank


# -- ways to launch --------------------------------------------------------------------------------------------------


def _digest_on_rank(rank: int, world_size: int, name: str, transport: Transport) -> str:
    strategy = PipelineStrategy(schedule=NAMES[name], transport=transport)
    module = Sharded()
    trainer_on_rank(rank, world_size, strategy=strategy).fit(module)
    return digest(module)


def expected_digest(name: str, transport: Transport = "auto") -> str:
    """The bits of the parameters after training on ranks that nobody launches, alike on all of them."""
    (found,) = set(run_ranks(_digest_on_rank, WORLD_SIZE, name, transport))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_shared_memory_and_the_backend_carry_the_same_bits(name: str) -> None:
    assert expected_digest(name, "shared_memory") == expected_digest(name, "backend")


def _launch(rank: int, world_size: int, name: str) -> None:
    launch_script.fit(name)


@pytest.mark.parametrize("name", ["gpipe_fork", pytest.param("pipeline_1f1b_notebook", marks=pytest.mark.slow)])
def test_forked_from_a_notebook_or_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_launch, 1, name, init=False)
    assert parameters_in(capsys.readouterr().out) == [expected_digest(name.rpartition("_")[0])]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "_spawn"])
@pytest.mark.parametrize("name", NAMES)
def test_as_a_script(name: str, suffix: str) -> None:
    assert parameters_of(run_script(SCRIPT, "fit", name + suffix)) == expected_digest(name)


@pytest.mark.slow
def test_as_a_module_of_a_package() -> None:
    completed = run_script(Path(sys.executable), "-m", "tests.helpers.launch_script", "fit", "gpipe")
    assert parameters_of(completed) == expected_digest("gpipe")


@pytest.mark.slow
def test_by_torchrun(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2")
    completed = run_script(torchrun(tmp_path), *options, str(SCRIPT), "fit", "pipeline_1f1b")
    assert parameters_of(completed) == expected_digest("pipeline_1f1b")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_over_two_nodes(tmp_path: Path, name: str) -> None:
    """Symptom: ranks of two hosts try to share memory."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-conf=store_type=file"]
    options += [f"--rdzv-endpoint={tmp_path / 'rendezvous'}", "--rdzv-id=nodes"]
    program = torchrun(tmp_path)
    with (
        start_script(program, *options, str(SCRIPT), "nodes", name) as one,
        start_script(program, *options, str(SCRIPT), "nodes", name) as other,
    ):
        first, second = one.finish(timeout=90.0), other.finish(timeout=90.0)
    for completed in (first, second):
        assert_clean(completed)
    assert "stages talk over the process group's backend, because the ranks do not share one host" in (
        first.stderr + second.stderr
    )
    assert parameters_in(first.stdout + second.stdout) == [expected_digest(name)]


BY_NAME = ["--trainer.strategy=gpipe"]
BY_CLASS = [
    "--trainer.strategy.class_path=ringstrategy.PipelineStrategy",
    "--trainer.strategy.init_args.num_stages=2",
    "--trainer.strategy.init_args.balance=[2,1]",
    "--trainer.strategy.init_args.schedule=1f1b",
    "--trainer.strategy.init_args.timeout=0:01:00",
]


@pytest.mark.filterwarnings("ignore")  # LightningCLI's own, on the use of jsonargparse and of `args`
def test_a_command_line_takes_the_name_or_the_class_with_arguments() -> None:
    for arguments, stages, schedule, seconds in ((BY_NAME, None, "gpipe", 1800), (BY_CLASS, 2, "1f1b", 60)):
        strategy = LightningCLI(Sharded, args=[*COMMAND_LINE, *arguments], run=False).trainer.strategy
        assert isinstance(strategy, PipelineStrategy)
        assert strategy._num_stages == stages
        assert strategy._balance == (None if stages is None else [2, 1])
        assert strategy._schedule == schedule
        assert strategy.timeout.total_seconds() == seconds


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "name"), [(BY_NAME, "gpipe"), (BY_CLASS, "pipeline_1f1b")])
def test_by_a_command_line(strategy: list[str], name: str) -> None:
    assert parameters_of(run_script(SCRIPT, "cli", "fit", *COMMAND_LINE, *strategy)) == expected_digest(name)


# -- several ---------------------------------------------------------------------------------------------------------


def assert_used_alike(used: list[Used]) -> None:
    """Every trainer of every stage came to the same end, and tested and predicted with what it had trained."""
    assert len({one.parameters for one in used}) == 1, used
    for one in used:
        assert one.tested == one.validated < one.before
        assert one.predicted == pytest.approx(one.tested)
        assert one.all_reduces == 0, "stages are not replicas"


def _use_twice(rank: int, world_size: int, name: str) -> list[Used]:
    strategy = partial(PipelineStrategy, schedule=NAMES[name])
    return launch_script.twice(lambda: trainer_on_rank(rank, world_size, strategy=strategy()))


@pytest.mark.parametrize("name", NAMES)
def test_two_trainers_in_turn_each_with_every_entry_point(name: str) -> None:
    """Symptom: the second use hangs; a layer has no values after training."""
    assert_used_alike([used for of_rank in run_ranks(_use_twice, 2, name) for used in of_rank])


@pytest.mark.slow
def test_every_entry_point_in_one_script() -> None:
    used = used_in(run_script(SCRIPT, "twice", "gpipe", timeout=90.0))
    assert len(used) == 4
    assert_used_alike(used)
