"""The strategy is there under its names, in every way to launch, as often and as many times at once as one likes."""

from __future__ import annotations

import importlib
import json
import re
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

import ringstrategy
from ringstrategy.registration import register
from tests.helpers import launch_script
from tests.helpers.launch_script import BATCH_SIZE, ROWS, WORLD_SIZE, Sharded, Used, digest
from tests.helpers.models import Batch, Regression
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import Completed, run_script, start_script
from tests.helpers.trainers import fit_ranks, trainer_on_rank

SCRIPT = Path(launch_script.__file__)
START_METHODS = {"ring_ddp": "popen", "ring_ddp_spawn": "spawn", "ring_ddp_fork": "fork", "ring_ddp_notebook": "fork"}
NAMES = [
    f"{name}{suffix}"
    for name in START_METHODS
    for suffix in ("", "_find_unused_parameters_true", "_find_unused_parameters_false")
]

# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_ddp_has_its_counterpart(name: str) -> None:
    assert name.replace("ring_ddp", "ddp") in StrategyRegistry.available_strategies()
    strategy = pl.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
    assert type(strategy) is ringstrategy.RingDDPStrategy
    assert strategy._start_method == next(START_METHODS[n] for n in reversed(START_METHODS) if name.startswith(n))


def test_registration_can_be_repeated() -> None:
    before = StrategyRegistry.available_strategies()
    importlib.reload(ringstrategy)
    register()
    assert StrategyRegistry.available_strategies() == before
    assert sum(name.startswith("ring_ddp") for name in before) == len(NAMES)


@pytest.mark.slow
def test_the_registry_of_the_other_package_says_what_to_import() -> None:
    completed = run_script(
        """
        import pytorch_lightning as pl
        import ringstrategy

        pl.Trainer(strategy="ring_ddp_spawn", accelerator="cpu", devices=2)
        """
    )
    assert completed.returncode == 1, completed
    assert "ImportError: ringstrategy works with `import lightning.pytorch as pl`" in completed.stderr, completed


# -- ways to launch --------------------------------------------------------------------------------------------------


def expected_digest() -> str:
    """The bits of the parameters after training on ranks that nobody launches."""
    (fitted, *_) = fit_ranks(Regression, WORLD_SIZE, rows=ROWS, batch_size=BATCH_SIZE)
    module = Regression()
    module.load_state_dict(fitted.parameters)
    return digest(module)


def parameters_of(completed: Completed) -> str:
    """What a script says of its parameters, once."""
    assert completed.returncode == 0, completed
    assert not completed.leftover_pids, completed
    assert "destroy_process_group" not in completed.stderr, completed
    (found,) = re.finditer(r"^parameters (\w+)$", completed.stdout, re.MULTILINE)
    return found[1]


def _launch(rank: int, world_size: int, name: str) -> None:
    launch_script.fit(name)


@pytest.mark.parametrize("name", ["ring_ddp_fork", "ring_ddp_notebook"])
def test_forked_from_a_notebook_or_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_launch, 1, name, init=False)
    assert re.findall(r"^parameters (\w+)$", capsys.readouterr().out, re.MULTILINE) == [expected_digest()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_ddp", "ring_ddp_spawn"])
def test_as_a_script(name: str) -> None:
    assert parameters_of(run_script(SCRIPT, "fit", name)) == expected_digest()


@pytest.mark.slow
def test_by_torchrun(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun.py"
    torchrun.write_text("from torch.distributed.run import main\n\nmain()\n")
    completed = run_script(torchrun, "--standalone", "--nproc-per-node", "2", str(SCRIPT), "fit", "ring_ddp")
    assert parameters_of(completed) == expected_digest()


COMMAND_LINE = [
    *("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.max_epochs=1", "--trainer.logger=false"),
    *("--trainer.enable_checkpointing=false", "--trainer.num_sanity_val_steps=0"),
    *("--trainer.use_distributed_sampler=false", "--trainer.enable_progress_bar=false"),
]
BY_NAME = ["--trainer.strategy=ring_ddp"]
BY_CLASS = [
    "--trainer.strategy.class_path=ringstrategy.RingDDPStrategy",
    "--trainer.strategy.init_args.timeout=0:01:00",
    "--trainer.strategy.init_args.bucket_cap_mb=0.5",
]


@pytest.mark.filterwarnings("ignore")  # LightningCLI's own, on the use of jsonargparse and of `args`
def test_a_command_line_takes_the_name_or_the_class_with_arguments() -> None:
    for arguments, timeout, bucket_cap_mb in ((BY_NAME, 1800, None), (BY_CLASS, 60, 0.5)):
        strategy = LightningCLI(Sharded, args=[*COMMAND_LINE, *arguments], run=False).trainer.strategy
        assert isinstance(strategy, ringstrategy.RingDDPStrategy)
        assert strategy.timeout.total_seconds() == timeout
        assert strategy._bucket_cap_mb == bucket_cap_mb


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [BY_NAME, BY_CLASS], ids=["name", "class"])
def test_by_a_command_line(strategy: list[str]) -> None:
    assert parameters_of(run_script(SCRIPT, "cli", "fit", *COMMAND_LINE, *strategy)) == expected_digest()


# -- several ---------------------------------------------------------------------------------------------------------


def assert_used_alike(used: list[Used]) -> None:
    """Every trainer of every rank came to the same end, and tested what it had trained."""
    assert len({one.parameters for one in used}) == 1, used
    for one in used:
        assert one.tested == one.validated < one.before
        assert one.all_reduces == 3, "one bucket for each of three batches, and no hook is left of an earlier fit"


def _use_twice(rank: int, world_size: int) -> list[Used]:
    return launch_script.twice(partial(trainer_on_rank, rank, world_size))


def test_two_trainers_in_turn_each_with_every_entry_point() -> None:
    """Symptom: the second use hangs, or gradients are summed twice."""
    assert_used_alike([used for of_rank in run_ranks(_use_twice, 2) for used in of_rank])


@pytest.mark.slow
def test_two_such_scripts_at_once() -> None:
    """Symptom: the address is in use."""
    with start_script(SCRIPT, "twice") as one, start_script(SCRIPT, "twice") as other:
        for completed in (one.finish(timeout=90.0), other.finish(timeout=90.0)):
            assert completed.returncode == 0, completed
            assert not completed.leftover_pids, completed
            assert "destroy_process_group" not in completed.stderr, completed
            lines = [line for line in completed.stdout.splitlines() if line.startswith("[")]
            assert len(lines) == 4
            assert_used_alike([Used(*json.loads(line)) for line in lines])


@pytest.mark.slow
def test_a_busy_port_is_named() -> None:
    with socket.create_server(("", 0)) as busy:
        port = str(busy.getsockname()[1])
        completed = run_script(SCRIPT, "fit", "ring_ddp", env={"MASTER_PORT": port}, timeout=60.0)
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert re.search(rf"Error.*{port}", completed.stderr), completed


# -- after training --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_launching_process_waits_for_ranks_that_are_not_done() -> None:
    completed = run_script(SCRIPT, "late", grace=0.0)
    assert completed.returncode == 0, completed
    assert not completed.leftover_pids, completed
    assert completed.stdout.splitlines()[-2:] == ["rank 0 is done", "rank 1 is done"], completed


def test_a_rank_that_fails_after_training_fails_the_job() -> None:
    """Symptom: the job looks successful although a rank has failed."""
    completed = run_script(SCRIPT, "late", "1")
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert "rank 0 is done" in completed.stdout
    assert "ValueError: late on rank 1" in completed.stderr
    assert re.search(r"rank 0 is done, but rank 1 \(pid \d+\) ended with exit code 1", completed.stderr), completed


# -- what a start checks ---------------------------------------------------------------------------------------------


def _start_without_training(rank: int, world_size: int) -> None:
    frozen = Sharded()
    frozen.freeze()
    trainer_on_rank(rank, world_size).test(frozen, verbose=False)


class WithoutParameters(Sharded):
    """Has nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Identity()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> None:
        return None


def _train_nothing(rank: int, world_size: int) -> int:
    trainer = trainer_on_rank(rank, world_size)
    trainer.fit(WithoutParameters())
    return trainer.fit_loop.epoch_loop.batch_idx


def test_nothing_to_train_is_no_error() -> None:
    run_ranks(_start_without_training, 2)
    assert run_ranks(_train_nothing, 2) == [2, 2]


def _other_shape(rank: int) -> Regression:
    return Regression(rank, net=nn.Sequential(nn.Linear(8, 6 + rank), nn.Tanh(), nn.Linear(6 + rank, 3)))


def _other_order(rank: int) -> Regression:
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return Regression(rank, net=nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in names)))


def _other_number(rank: int) -> Regression:
    return Regression(rank, net=nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + rank))))


FIRST_DIFFERENCE: dict[Callable[[int], Regression], tuple[str, str]] = {
    _other_shape: ("'net.0.weight' with shape (6, 8)", "'net.0.weight' with shape (7, 8)"),
    _other_order: ("'net.a.weight' with shape (8, 8)", "'net.b.weight' with shape (8, 8)"),
    _other_number: ("absent", "'net.2.weight' with shape (8, 8)"),
}


@pytest.mark.parametrize("build", FIRST_DIFFERENCE)
def test_ranks_with_different_models_are_refused(build: Callable[[int], Regression]) -> None:
    """Symptom: gradients of one layer are added to those of another."""
    on_0, on_1 = map(re.escape, FIRST_DIFFERENCE[build])
    with pytest.raises(RanksFailedError) as failure:
        fit_ranks(build, 2, rows=16, batch_size=4)
    for outcome in failure.value.outcomes:
        message = rf"ParameterMismatch: The ranks do not hold the same model: .* {on_0}.* rank 0 and {on_1}.* rank 1"
        assert re.search(message, str(outcome.error)), outcome.error
