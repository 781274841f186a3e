"""docs/how-to holds: its programs and commands run, and what it says of others' variables and batches is so."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ringstrategy import environments
from ringstrategy.failure import FailureMonitor
from tests.docs.markdown import Block, blocks, commands
from tests.docs.programs import programs, run_program, terminal
from tests.docs.ways import STEPS, config_only, execute, here
from tests.helpers.ranks import RanksFailedError, run_ranks
from tests.helpers.scripts import Completed, RunningScript, start_script
from tests.helpers.trainers import trainer_on_rank

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "how-to"
HOSTS, PLATFORMS, CHUNKS, MONITOR, HANG, RESUME = (
    FOLDER / f"{name}.md"
    for name in (
        "torchrun-and-slurm",
        "managed-platforms",
        "choose-chunks-and-balance",
        "read-ring-monitor",
        "debug-a-hang",
        "resume-with-other-ranks",
    )
)
FEW = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]


def _words(page: Path) -> str:
    return " ".join(page.read_text().split())


def _of(page: Path, language: str, with_: str = "") -> list[str]:
    """Blocks of a language that have a text in them."""
    return [block.text for block in blocks(page) if block.language == language and with_ in block.text]


def _free_port(first: int = 0, last: int = 2**16) -> int:
    for port in itertools.chain([0] if not first else range(first, last)):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return int(sock.getsockname()[1])
    raise OSError("no port is free")


@contextlib.contextmanager
def _shell(text: str, folder: Path, env: dict[str, str], name: str = "block.sh") -> Iterator[RunningScript]:
    script = folder / name
    script.write_text(text if text.startswith("#!") else f"#!/bin/bash\nset -e\n{text}")
    script.chmod(0o755)
    with start_script(script, env=env, cwd=folder) as running:
        yield running


def _done(running: RunningScript, timeout: float = 200.0) -> Completed:
    ended = running.finish(timeout)
    assert ended.returncode == 0, ended
    assert not ended.leftover_pids, ended
    return ended


# -- blocks of Python ------------------------------------------------------------------------------------------------

SNIPPETS = [
    (page, block)
    for page in sorted(FOLDER.glob("*.md"))
    for block in blocks(page)
    if block.language == "python" and not re.match(r"# \w+\.py\n", block.text)
]


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(page, block, id=f"{page.stem}-{block.line}") for page, block in SNIPPETS]
)
def test_a_block_trains(page: Path, block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "ModelCheckpoint" in block.text:
        block = replace(block, text=block.text.replace("devices=2", "devices=2, enable_checkpointing=True"))
    epochs = max([1, *map(int, re.findall(r"max_epochs=(\d)", block.text))])
    assert run_ranks(execute, 2, block) == [STEPS * epochs] * 2


def test_every_block_is_of_a_kind_that_is_run() -> None:
    kinds = {block.language for page in FOLDER.glob("*.md") for block in blocks(page)}
    assert kinds <= {"python", "console", "bash", "text"}
    assert len(SNIPPETS) == 4


# -- several hosts ---------------------------------------------------------------------------------------------------

TORCHRUN = _of(HOSTS, "bash", "torchrun ")
(SBATCH,) = _of(HOSTS, "bash", "#SBATCH")
DIRECTIVES = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", SBATCH, re.MULTILINE))

_SRUN = """
import os, re, signal, subprocess, sys

nodes, per_node, words = 2, int(os.environ["SLURM_NTASKS_PER_NODE"]), sys.argv[1:]
while words[0].startswith("--"):
    per_node = int(re.fullmatch("--ntasks-per-node=(.+)", words.pop(0))[1])
tasks = []
for rank in range(nodes * per_node):
    numbers = {"NTASKS": nodes * per_node, "NTASKS_PER_NODE": per_node, "PROCID": rank,
               "LOCALID": rank % per_node, "NODEID": rank // per_node}
    env = os.environ | {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    tasks.append(subprocess.Popen(words, env=env))
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
open(f"srun.{per_node}", "w").write(str(os.getpid()))
sys.exit(max(task.wait() for task in tasks))
"""
_SCONTROL = "import sys\nopen('requeued', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"


def _here(text: str, port: int) -> str:
    """A block with this machine in place of the first host, and an interface that it has."""
    return text.replace("host-a", "127.0.0.1").replace("29500", str(port)).replace("eth0", "lo")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(len(TORCHRUN)), ids=["c10d", "static"])
def test_torchrun_on_two_hosts(number: int, tmp_path: Path) -> None:
    text = _here(TORCHRUN[number], _free_port())
    env = terminal(tmp_path, "--trainer.max_epochs=1", *FEW)
    other = text.replace("--node-rank=0", "--node-rank=1")
    with _shell(text, tmp_path, env) as first, _shell(other, tmp_path, env, "other.sh") as second:
        printed = [_done(one).stdout for one in (first, second)]
    assert sum("Summary" in one for one in printed) == 1
    assert re.search(r"ranks +│ 4 ", "".join(printed))


def test_the_script_for_slurm_asks_for_what_it_uses(tmp_path: Path) -> None:
    assert DIRECTIVES["nodes"] == "2"
    assert DIRECTIVES["ntasks-per-node"] == "2"
    assert re.fullmatch(r"SIGUSR1@\d+", DIRECTIVES["signal"])
    assert "requeue" in DIRECTIVES
    with _shell("bash -n ./digits.sbatch", tmp_path, {}) as running:
        (tmp_path / "digits.sbatch").write_text(SBATCH)
        _done(running)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_script_for_slurm_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """With stand-ins for srun, which starts all tasks here, and for scontrol, which only notes what it is told."""
    port = _free_port(15001, 24999)  # as Lightning makes it of the job's number
    env = terminal(tmp_path, "--trainer.max_epochs=30", stand_ins={"srun": _SRUN, "scontrol": _SCONTROL})
    job = str(port - 15000)
    env |= {"SLURM_JOB_ID": job, "SLURM_JOB_NAME": "digits", "SLURM_NODELIST": "127.0.0.1"}
    env |= {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "1"}
    script = _here(SBATCH, port)
    saved = tmp_path / "jobs" / job / "hpc_ckpt_1.ckpt"
    with _shell(script, tmp_path, env, "digits.sbatch") as running:
        _wait_for(tmp_path / "runs" / "digits" / "version_0" / "metrics.csv")
        os.kill(int((tmp_path / "srun.2").read_text()), 10)
        _wait_for(saved)
        running.kill()
    assert (tmp_path / "requeued").read_text() == f"requeue {job}\n"
    reached = torch.load(saved, weights_only=True)["global_step"]
    assert reached > 0
    env["RUN_MORE"] = " ".join(["--trainer.max_epochs=1", *FEW])
    with _shell(script, tmp_path, env, "digits.sbatch") as running:
        ended = _done(running)
    assert f"Restoring states from the checkpoint path at {saved.relative_to(tmp_path)}" in ended.stderr, ended


def _wait_for(path: Path, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


def test_a_timeout_can_be_given_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = (one for one in commands(HOSTS) if ".timeout" in one)
    config_only(command, tmp_path)


# -- platforms -------------------------------------------------------------------------------------------------------

FIVE = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def unnumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*FIVE, "NODE_RANK", "GROUP_RANK"]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unnumbered")
@pytest.mark.parametrize(
    ("names", "external", "taken"),
    [
        ("RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT", True, True),
        ("MASTER_ADDR MASTER_PORT", False, False),
        ("LOCAL_RANK MASTER_ADDR MASTER_PORT", True, False),
        ("", False, False),
        *((" ".join(name for name in FIVE if name != missing), missing != "LOCAL_RANK", False) for missing in FIVE),
    ],
)
def test_who_starts_the_ranks(names: str, external: bool, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names.split():
        monkeypatch.setenv(name, FIVE[name])
    environment = environments.as_numbered(LightningEnvironment())
    assert environment is not None
    assert environment.creates_processes_externally is external
    assert (type(environment) is not LightningEnvironment) is taken
    if taken:
        assert environment.global_rank() == 3


@pytest.mark.usefixtures("unnumbered")
def test_the_line_in_the_log_is_the_one_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(environments, "rank_zero_info", said.append)
    for name, value in FIVE.items():
        monkeypatch.setenv(name, value)
    environments.as_numbered(LightningEnvironment())
    assert [f"{line}\n" for line in said] == _of(PLATFORMS, "text", "this process is started")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", _of(PLATFORMS, "bash"), ids=["ranks", "hosts", "one rank", "doctor"])
def test_a_block_for_a_platform(text: str, tmp_path: Path) -> None:
    env = terminal(tmp_path, "--trainer.max_epochs=1", *FEW)
    if "$RANK" in text:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if "$WORLD_SIZE" in text:
        env |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with _shell(_here(text, _free_port()), tmp_path, env) as running:
        ended = _done(running)
    assert "Summary" in ended.stdout, ended
    if "RANK=1" in text:
        assert _of(PLATFORMS, "text", "this process is started")[0].strip() in ended.stderr, ended


# -- micro-batches ---------------------------------------------------------------------------------------------------

TINY = {"--model resnet18": "--model squeezenet1_1", "--model mobilenet_v3_small": "--model mlp"}


@pytest.mark.parametrize("command", [one for one in commands(CHUNKS) if one.startswith("ringstrategy plan --model")])
def test_a_plan(command: str, tmp_path: Path) -> None:
    if "$chunks" in command:
        command = command.replace("$chunks", "2").partition("|")[0]
    here("--model", "squeezenet1_1", "--size", "32", "--batch", "8")(command, tmp_path)


def test_a_recipe_takes_the_layers_by_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = (one for one in commands(CHUNKS) if one.startswith("ringstrategy run"))
    balance = re.findall(r"--trainer.strategy.balance (\S+)", command)[0]
    words = command.replace(f"--trainer.strategy.balance {balance} ", "")
    config_only(words, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("text", [*_of(CHUNKS, "bash"), *_of(CHUNKS, "console")])
def test_a_block_on_micro_batches(text: str, tmp_path: Path) -> None:
    for model, tiny in TINY.items():
        text = text.replace(model, tiny)
    if "bench" in text:
        text = text.strip() + " --steps 1 --warmup 1 --rounds 1\n"
    with _shell(text, tmp_path, terminal(tmp_path, "--trainer.max_epochs=1", *FEW)) as running:
        assert _done(running).stdout.strip()


# -- RingMonitor -----------------------------------------------------------------------------------------------------

CASES = [name for name in programs(MONITOR) if name not in ("network.py", "seldom.py")]
QUICK = ("slow.py", "bubble.py")


def _rows(table: str) -> list[str]:
    cells = [line.strip("│ ").partition("│")[0].strip() for line in table.splitlines() if line.startswith("│")]
    return [cell for cell in cells if cell]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_a_pattern_looks_as_it_is_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = programs(MONITOR)
    (tmp_path / "network.py").write_text(known["network.py"])
    run_ranks(run_program, 2, known[name], tmp_path, limit_train_batches=6)
    printed = capsys.readouterr().out
    text = MONITOR.read_text()
    shown = text[text.index(f"# {name}") :].partition("```text\n")[2].partition("```")[0]
    assert _rows(shown) == _rows(printed[printed.index("RingMonitor:") :]) != []
    assert re.sub(r"[\d.]+", "0", shown.splitlines()[-1].partition(",")[0]) in re.sub(r"[\d.]+", "0", printed)
    if name == "slow.py":
        assert "slowest: rank 1" in printed
        assert "slowest: rank 1" in shown


@pytest.mark.slow
def test_averaging_less_often(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = programs(MONITOR)
    (tmp_path / "network.py").write_text(known["network.py"])
    run_ranks(run_program, 2, known["seldom.py"], tmp_path, limit_train_batches=8)
    assert "copies into buckets" in capsys.readouterr().out


# -- hangs -----------------------------------------------------------------------------------------------------------


def _failure(name: str, seconds: float) -> tuple[str, str]:
    """What the ranks write when a program of the page is run with a shorter timeout."""
    text, count = re.subn(r"timedelta\(seconds=\d+\)", f"timedelta(seconds={seconds})", programs(HANG)[name])
    assert count == 1
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(_run_impatiently, 2, text, Path.cwd(), grace=20.0)
    first, second = (outcome.output + (outcome.error or "") for outcome in failure.value.outcomes)
    return first, second


def _run_impatiently(rank: int, world_size: int, text: str, folder: Path) -> None:
    """As after a minute, a second after the fact."""
    defaults = FailureMonitor.__init__.__kwdefaults__
    assert defaults is not None
    defaults["warn_after"] = 1.0
    run_program(rank, world_size, text, folder)


def _shown_after(name: str) -> str:
    """The first output that the page shows behind a program."""
    text = HANG.read_text()
    return text[text.index(f"# {name}") :].partition("```text\n")[2].partition("\n```")[0]


def test_ranks_on_different_ways_name_both_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pattern = r"did not reach (.+?) within \d+ s \(it waits for (.+?)\)(?: \[|;|$)"
    places = re.findall(pattern, _shown_after("astray.py"))
    found = {place for one in _failure("astray.py", 4) for place in re.findall(pattern, one, re.MULTILINE)}
    assert {frozenset(place) for place in found} == {frozenset(place) for place in places} != set()


def test_a_rank_that_skips_a_batch_says_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reason = _shown_after("skips.py").partition("): ")[2].partition(" [this rank")[0]
    assert reason
    assert reason in _failure("skips.py", 20)[0]


@pytest.mark.slow
def test_a_rank_that_is_late_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, _ = _failure("late.py", 4)
    assert re.search(r"waiting for rank 1 \(pid \d+ on \S+\) to reach gradient bucket 0", first)
    assert "did not reach gradient bucket 0" in first


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_stack_of_a_late_rank(tmp_path: Path) -> None:
    (start,), (kill,) = _of(HANG, "console", "FAULTHANDLER"), _of(HANG, "console", "kill")
    (tmp_path / "late.py").write_text(programs(HANG)["late.py"])
    with _shell(start, tmp_path, terminal(tmp_path)) as running:
        running.wait_for("waiting for rank 1", timeout=150.0)
        (late,) = set(re.findall(r"waiting for rank 1 \(pid (\d+) on", running.stderr))
        subprocess.run(["bash", "-c", re.sub(r"\d+", late, kill)], check=True)
        ended = running.finish()
    assert ended.returncode == 1, ended
    for shown in _of(HANG, "text", "Fatal")[0].split("...\n"):
        assert re.sub(r'".*/?late.py"', "late.py", shown.strip()) in re.sub(r'"\S*late.py"', "late.py", ended.stderr)
    assert "rank 1 failed first" in ended.stderr, ended


# -- resuming --------------------------------------------------------------------------------------------------------


class _Seen(pl.LightningModule):
    """Remembers which samples it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.current_epoch == 0:
            self.seen.append((batch_idx, batch.tolist()))
        loss: Tensor = self.net(batch.float()[:, None]).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _rest(rank: int, world_size: int, batch_size: int, folder: Path, resume: bool) -> list[tuple[int, list[int]]]:
    module = _Seen()
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options: dict[str, Any] = {} if resume else {"callbacks": [save], "enable_checkpointing": True}
    trainer = trainer_on_rank(
        rank, world_size, strategy="ring_ddp" if world_size > 1 else "auto", use_distributed_sampler=True, **options
    )
    trainer.fit(module, DataLoader(range(32), batch_size), ckpt_path=folder / "step=3.ckpt" if resume else None)  # type: ignore[arg-type]
    return module.seen


def test_in_the_middle_of_an_epoch_the_number_of_the_batch_is_resumed(tmp_path: Path) -> None:
    def fit(ranks: int, batch_size: int, resume: bool = True) -> list[list[tuple[int, list[int]]]]:
        return run_ranks(_rest, ranks, batch_size, tmp_path, resume, init=ranks > 1)

    unbroken = fit(2, 2, resume=False)
    of_batch = [
        {sample for rank in unbroken for number, samples in rank if number == batch for sample in samples}
        for batch in range(8)
    ]
    same, alone, four, half = fit(2, 2), fit(1, 4), fit(4, 1), fit(4, 2)
    for resumed in (same, four):
        for rank in resumed:
            assert [number for number, _ in rank] == [3, 4, 5, 6, 7]
        for place in range(5):
            assert {sample for rank in resumed for sample in rank[place][1]} == of_batch[place]
    assert [number for number, _ in alone[0]] == [3, 4, 5, 6, 7]
    assert [samples for _, samples in alone[0]] == [list(range(4 * place, 4 * place + 4)) for place in range(5)]
    assert [[number for number, _ in rank] for rank in half] == [[3]] * 4


def test_a_schedule_of_torch_keeps_its_length() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    old, new = (torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) for steps in (10, 20))
    new.load_state_dict(old.state_dict())
    assert new.T_max == 10


def test_what_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(_rest, 2, 2, tmp_path, False)
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["look.py", str(tmp_path / "step=3.ckpt")])
    exec(compile(programs(RESUME)["look.py"], "look.py", "exec"), {})
    (shown,) = _of(RESUME, "text", "state_dict")
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line.split() for line in shown.splitlines()] == printed


def test_the_names_of_strategies_are_registered() -> None:
    row = next(line for line in RESUME.read_text().splitlines() if "one process" in line)
    assert set(re.findall(r"`(\w+)`", row)) <= set(StrategyRegistry)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_recipe_goes_on_with_other_ranks(tmp_path: Path) -> None:
    (text,) = _of(RESUME, "bash", "--ckpt_path")
    with _shell(text, tmp_path, terminal(tmp_path, *FEW)) as running:
        ended = _done(running, timeout=380.0)
    assert ended.stderr.count("Restoring states from the checkpoint path at runs/digits/") >= 2, ended
    assert re.findall(r"ranks +│ (\d) ", ended.stdout) == ["2", "4", "2"]
