"""The strategy is there under its names, in every way to launch, as often and as many times at once as one likes."""

from __future__ import annotations

import importlib
import pickle
import re
import socket
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import ringstrategy
from ringstrategy.registration import register
from tests.helpers import launch_script
from tests.helpers.launch_script import BATCH_SIZE, ROWS, WORLD_SIZE, Sharded, Used, digest
from tests.helpers.launches import COMMAND_LINE, SCRIPT, parameters_in, parameters_of, torchrun, used_in
from tests.helpers.models import Regression
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script, start_script
from tests.helpers.trainers import fit_ranks, trainer_on_rank

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


@pytest.mark.parametrize("strategy", [ringstrategy.RingDDPStrategy, ringstrategy.PipelineStrategy])
def test_a_strategy_can_be_sent_to_a_spawned_worker(strategy: type[ringstrategy.RingDDPStrategy]) -> None:
    assert type(pickle.loads(pickle.dumps(strategy(start_method="spawn")))) is strategy


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


def _launch(rank: int, world_size: int, name: str) -> None:
    launch_script.fit(name)


@pytest.mark.parametrize("name", ["ring_ddp_fork", "ring_ddp_notebook"])
def test_forked_from_a_notebook_or_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(_launch, 1, name, init=False)
    assert parameters_in(capsys.readouterr().out) == [expected_digest()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring_ddp", "ring_ddp_spawn"])
def test_as_a_script(name: str) -> None:
    assert parameters_of(run_script(SCRIPT, "fit", name)) == expected_digest()


@pytest.mark.slow
def test_by_torchrun(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2")
    completed = run_script(torchrun(tmp_path), *options, str(SCRIPT), "fit", "ring_ddp")
    assert parameters_of(completed) == expected_digest()


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
    with start_script(SCRIPT, "twice", "ring_ddp") as one, start_script(SCRIPT, "twice", "ring_ddp") as other:
        for completed in (one.finish(timeout=90.0), other.finish(timeout=90.0)):
            used = used_in(completed)
            assert len(used) == 4, completed
            assert_used_alike(used)


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


def test_a_rank_that_leaves_before_it_has_met_the_others_fails_the_job() -> None:
    """Symptom: rank 0 waits for minutes for ranks that do not come."""
    completed = run_script(
        """
        import os

        if __name__ == "__main__" and "LOCAL_RANK" not in os.environ:  # as if only one process were to train
            from tests.helpers.launch_script import fit

            fit("ring_ddp")
        """
    )
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert re.search(r"rank 0: rank 1 \(pid \d+\) ended with exit code 0; this run cannot go on", completed.stderr)


@pytest.mark.slow
def test_a_failure_that_the_program_catches_still_fails_the_job() -> None:
    completed = run_script(
        """
        import os
        import signal

        from ringstrategy import RankFailure
        from tests.helpers.launch_script import Sharded, trainer

        class Killed(Sharded):
            def on_train_batch_end(self, *args):
                if self.trainer.global_rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            try:
                trainer("ring_ddp").fit(Killed())
            except RankFailure as failure:
                print("caught", failure)
        """
    )
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert "caught rank 1 failed first" in completed.stdout, completed
    assert re.search(r"rank 0 is done, but rank 1 \(pid \d+\) ended with exit code -9", completed.stderr), completed
