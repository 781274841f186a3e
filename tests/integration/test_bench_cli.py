from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from ringstrategy.cli.main import main
from tests.helpers.processes import LiveProcess
from tests.helpers.scripts import RunningScript, start_script

COMMAND = """
    import sys
    from ringstrategy.cli.main import main

    if __name__ == "__main__":
        sys.exit(main())
"""
ENDLESS = [
    "bench all-reduce --sizes 1MiB --repeats 1000000",
    "bench train-step --strategies ddp --steps 1000000",
    "bench pipeline --model mlp --batch 8 --chunks 2 --steps 1000000",
]


def test_all_reduce_measures_ours_and_the_backends_in_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    words = "bench all-reduce --ranks 2 --sizes 4KiB,100000 --repeats 3 --warmup 1"
    assert main([*words.split(), "--json", str(rows_file), "--plot", str(picture)]) == 0

    written = json.loads(rows_file.read_text())
    assert [(row["collective"], row["bytes"]) for row in written["rows"]] == [
        *[("shared_memory", 4096), ("backend", 4096)],
        *[("shared_memory", 100_000), ("backend", 100_000)],
    ]
    for row in written["rows"]:
        assert row["ranks"] == 2
        assert 0 < row["median_s"] < 10
        assert row["busbw_GBps"] == pytest.approx(row["bytes"] / row["median_s"] / 1e9)
    assert words in written["environment"]["command"].replace("--algorithms shared_memory,backend --dtype float32 ", "")
    assert picture.stat().st_size > 10_000
    output = capsys.readouterr().out
    assert "vs backend" in output
    assert written["environment"]["cpu"] in output


def test_three_ranks_and_two_byte_elements(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench all-reduce --ranks 3 --sizes 1022 --dtype bfloat16 --repeats 1 --warmup 0"
    assert main(words.split()) == 0
    assert "1022" in capsys.readouterr().out


def test_all_algorithms_in_one_run_and_what_measuring_would_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    names = ["ring", "tree", "naive", "shared_memory", "backend"]
    words = f"bench all-reduce --sizes 1004,100000 --algorithms {','.join(names)},measure --repeats 2 --warmup 1"
    assert main([*words.split(), "--json", str(rows_file), "--plot", str(picture)]) == 0
    rows = json.loads(rows_file.read_text())["rows"]
    assert [(row["bytes"], row["collective"]) for row in rows] == [
        (size, name) for size in (1004, 100_000) for name in names
    ]
    for size in (1004, 100_000):
        assert sum(row["chosen"] for row in rows if row["bytes"] == size) == 1
    output = capsys.readouterr().out
    assert "chosen" in output
    assert "what 'measure' chose is at most" in output
    assert picture.stat().st_size > 10_000


def test_an_algorithm_that_is_not_to_be_had_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all-reduce", "--sizes", "1KiB", "--algorithms", "backend,hierarchical"]) == 1
    assert "'hierarchical' is not available here: all ranks run on one host" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_step_measures_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.json"
    words = "bench train-step --batch-size 4 --strategies ring_ddp,none --steps 3 --warmup 2 --rounds 1"
    assert main([*words.split(), "--json", str(rows_file)]) == 0
    ours, floor = _check_train_rows(rows_file, ["ring_ddp", "none"])
    assert ours["all_reduce_s"] > 0
    assert ours["exposed_s"] >= 0
    assert ours["copy_s"] > 0
    assert floor["all_reduce_s"] is floor["copy_s"] is None
    captured = capsys.readouterr()
    assert "over none" in captured.out
    assert "round 1 of 1: ring_ddp" in captured.err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_step_of_a_convolutional_network_with_variants_in_two_rounds(tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    strategies = ["ring_ddp+release", "ddp", "ddp+keep"]
    words = f"bench train-step --model mobilenet_v3_small --batch-size 2 --strategies {','.join(strategies)}"
    words += " --steps 3 --warmup 2 --rounds 2"
    assert main([*words.split(), "--json", str(rows_file), "--plot", str(picture)]) == 0
    rows = _check_train_rows(rows_file, strategies, model="mobilenet_v3_small")
    assert all(len(row["rounds_s"]) == 2 for row in rows)
    assert picture.stat().st_size > 10_000


@pytest.mark.timeout(300)
def test_pipelines_are_measured_on_the_same_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows_file = tmp_path / "rows.json"
    words = "bench pipeline --model mlp --batch 8 --chunks 2 --variants 1f1b,torch_1f1b --rounds 1 --steps 2 --warmup 0"
    assert main([*words.split(), "--json", str(rows_file)]) == 0
    ours, theirs = _check_pipeline_rows(rows_file, [("1f1b", 2), ("torch_1f1b", 2)])
    # 8 vectors of 1024 float32 there, their gradients back, and ours gives the loss to all.
    assert theirs["sent_bytes"] == 2 * 8 * 1024 * 4
    assert ours["sent_bytes"] == theirs["sent_bytes"] + 4
    captured = capsys.readouterr()
    assert "vs torch" in captured.out
    assert "memory: torch_1f1b, chunks=2" in captured.err


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [2, 3])
def test_pipelines_of_a_convolutional_network(stages: int, tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    words = f"bench pipeline --model resnet18 --stages {stages} --batch 6 --chunks 3 --rounds 2 --steps 1"
    assert main([*words.split(), "--json", str(rows_file), "--plot", str(picture)]) == 0
    names = ("gpipe", "1f1b", "torch_gpipe", "torch_1f1b")
    rows = _check_pipeline_rows(rows_file, [("naive", 1), *((name, 3) for name in names)])
    assert all(len(row["rounds_s"]) == 2 and len(row["balance"]) == stages for row in rows)
    assert rows[1]["ideal_bubble"] == (stages - 1) / (stages + 2)
    assert picture.stat().st_size > 10_000


def test_a_pipeline_that_cannot_run_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench pipeline --model squeezenet1_1 --image-size 2 --batch 2 --chunks 2 --variants gpipe"
    assert main(words.split()) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "squeezenet1_1 cannot be cut into 2 stages and run" in error
    assert "Kernel size can't be greater than actual input size" in error


@pytest.mark.slow
def test_a_run_that_cannot_train_ends_with_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    # Inception reduces a picture of this size to nothing.
    words = "bench train-step --model inception_v3 --image-size 32 --batch-size 2 --strategies none --rounds 1"
    assert main(words.split()) == 1
    error = capsys.readouterr().err
    assert "the run with none failed" in error
    assert "Kernel size can't be greater than actual input size" in error


@pytest.mark.slow
@pytest.mark.parametrize("words", ENDLESS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_dead_rank_ends_everything(words: str, rank: int) -> None:
    with start_script(COMMAND, *words.split()) as bench:
        ranks = _wait_for_ranks(bench)
        os.kill(ranks[rank].pid, signal.SIGKILL)
        completed = bench.finish(timeout=60.0)
    assert completed.returncode == 1, completed
    assert not completed.leftover_pids, completed
    assert "ringstrategy bench: error:" in completed.stderr


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("words", ENDLESS)
def test_a_signal_ends_everything(words: str, signum: signal.Signals) -> None:
    with start_script(COMMAND, *words.split()) as bench:
        _wait_for_ranks(bench)
        bench.send_signal(signum)
        completed = bench.finish(timeout=30.0)
    assert completed.returncode not in (0, None), completed
    assert not completed.leftover_pids, completed


def _check_train_rows(file: Path, strategies: list[str], model: str = "mlp") -> list[dict[str, Any]]:
    written: dict[str, Any] = json.loads(file.read_text())
    assert [row["strategy"] for row in written["rows"]] == strategies
    for row in written["rows"]:
        assert (row["model"], row["ranks"]) == (model, 2)
        assert 0 < row["median_s"] < 10
        assert 100 < row["peak_pss_MiB"] < 10_000
    rows: list[dict[str, Any]] = written["rows"]
    return rows


def _check_pipeline_rows(file: Path, contenders: list[tuple[str, int]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    assert [(row["variant"], row["chunks"]) for row in rows] == contenders
    assert len({tuple(row["balance"]) for row in rows}) == 1
    for row in rows:
        assert 0 < max(*row["forward_s"], *row["backward_s"]) < row["critical_s"]
        assert 0 < row["median_s"] < 30
        assert 0 < row["bubble"] < 1
        assert len(row["peak_pss_MiB"]) == row["stages"]
        assert all(30 < peak < 10_000 for peak in row["peak_pss_MiB"])
    return rows


def _wait_for_ranks(bench: RunningScript, ranks: int = 2) -> list[LiveProcess]:
    """The processes that train or reduce, in the order of their start, once they have had time to connect."""
    deadline = time.monotonic() + 60
    while len(found := _ranks(bench.processes())) < ranks:
        assert time.monotonic() < deadline, bench.stderr
        time.sleep(0.05)
    time.sleep(6.0)
    return sorted(found, key=lambda process: process.pid)


def _ranks(processes: list[LiveProcess]) -> list[LiveProcess]:
    servers = {process.pid for process in processes if "multiprocessing.forkserver" in process.command}
    return [process for process in processes if process.parent in servers or "bench.train_worker" in process.command]
