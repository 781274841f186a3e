"""Training over two hosts, made of network namespaces of one machine: started in every way, and with a cut link."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringstrategy.collectives.hierarchical import HierarchicalAllReduce
from ringstrategy.process_group import RankGroup
from tests.helpers import host_script
from tests.helpers.assertions import assert_close_to_single_process, assert_ranks_identical
from tests.helpers.host_ranks import PER_HOST, train_on_hosts
from tests.helpers.host_script import BATCH_SIZE, Options
from tests.helpers.hosts import TwoHosts, enter, start_on, two_hosts
from tests.helpers.launches import assert_clean, torchrun
from tests.helpers.models import blocks, network, train_single_process
from tests.helpers.ranks import Outcome, RanksFailedError, run_ranks
from tests.helpers.scripts import Completed, RunningScript

SCRIPT = Path(host_script.__file__)
PORT = "29431"  # free: the hosts are new
RANKS = 2 * PER_HOST
TOLERANCE = 1e-12  # of float64, summed in another order

# -- ways to launch --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def launched(hosts: TwoHosts, way: str, folder: Path, *options: str) -> Iterator[list[RunningScript]]:
    """Start a training on both hosts; yields what was started, by host."""
    meeting = {"MASTER_ADDR": hosts.address, "MASTER_PORT": PORT}
    arguments = ("2", str(PER_HOST), *options)
    with contextlib.ExitStack() as stack:
        started = []
        for host in range(2):
            if way == "torchrun":
                nodes = ("--nnodes=2", f"--node-rank={host}", f"--nproc-per-node={PER_HOST}")
                where = (f"--master-addr={hosts.address}", f"--master-port={PORT}")
                command = (*nodes, *where, str(SCRIPT), *arguments)
                started.append(stack.enter_context(start_on(hosts, host, torchrun(folder), *command)))
                continue
            if way == "lightning":
                started.append(
                    stack.enter_context(
                        start_on(hosts, host, SCRIPT, *arguments, env={**meeting, "NODE_RANK": str(host)})
                    )
                )
                continue
            for local in range(PER_HOST):
                rank = host * PER_HOST + local
                numbers = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": local}
                env = {**meeting, **{name: str(value) for name, value in numbers.items()}}
                if way == "slurm":
                    env = slurm(hosts, host, local)
                started.append(stack.enter_context(start_on(hosts, host, SCRIPT, *arguments, env=env)))
        yield started


def slurm(hosts: TwoHosts, host: int, local: int) -> dict[str, str]:
    """What ``srun`` sets for a task."""
    numbers = {
        "JOB_ID": 4431,
        "JOB_NAME": "training",
        "NNODES": 2,
        "NTASKS": RANKS,
        "NTASKS_PER_NODE": PER_HOST,
        "NODEID": host,
        "PROCID": host * PER_HOST + local,
        "LOCALID": local,
        "NODELIST": f"{hosts.address},{hosts.address[:-1]}2",
    }
    return {f"SLURM_{name}": str(value) for name, value in numbers.items()}


def ended(completed: list[Completed]) -> dict[int, dict[str, object]]:
    """What the ranks of a successful training say, by rank."""
    for one in completed:
        assert_clean(one)
    said = [json.loads(one) for whole in completed for one in re.findall(r"\{.*?\}", whole.stdout)]
    return {one.pop("rank"): one for one in said}


def expected_parameters(options: Options, replicas: int) -> dict[str, Tensor]:
    """What one process trains on the same data."""
    batch_size = replicas * BATCH_SIZE
    batches = blocks(options.steps * batch_size, batch_size, torch.float64)
    return train_single_process(network(dtype=torch.float64), batches)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["lightning", "torchrun", "variables", "slurm"])
def test_two_hosts_train_as_one_process_however_they_are_started(way: str, tmp_path: Path) -> None:
    saved = tmp_path / "parameters.pt"
    with two_hosts() as hosts, launched(hosts, way, tmp_path, f"save={saved}") as started:
        of_ranks = ended([one.finish(timeout=90.0) for one in started])
    assert sorted(of_ranks) == [0, 1, 2, 3]
    assert len({one["parameters"] for one in of_ranks.values()}) == 1
    assert_close_to_single_process(
        torch.load(saved, weights_only=True), expected_parameters(Options(), RANKS), TOLERANCE
    )


# -- training --------------------------------------------------------------------------------------------------------


def test_gradients_are_added_on_each_host_before_they_cross_the_link(tmp_path: Path) -> None:
    options = Options()
    with two_hosts() as hosts:
        ranks = run_ranks(train_on_hosts, RANKS, hosts, tmp_path, options, init=False)
    for rank in ranks:
        assert rank.collective == "hierarchical"
        assert_ranks_identical([rank.parameters, ranks[0].parameters])
    assert_close_to_single_process(ranks[0].parameters, expected_parameters(options, RANKS), TOLERANCE)
    # Over two hosts every number crosses once in each direction; buckets have room for flags, and for alignment.
    least = 2 * options.steps * sum(value.nbytes for value in ranks[0].parameters.values())
    assert least < sum(rank.communication.bytes_sent for rank in ranks) < 1.5 * least


@pytest.mark.slow
def test_pipelines_on_two_hosts(tmp_path: Path) -> None:
    options = Options(stages=2)
    with two_hosts() as hosts:
        ranks = run_ranks(train_on_hosts, RANKS, hosts, tmp_path, options, init=False)
    for rank in ranks:
        assert_close_to_single_process(rank.parameters, expected_parameters(options, replicas=2), TOLERANCE)


def _counted(rank: int, world_size: int, hosts: TwoHosts, folder: Path) -> tuple[int, int]:
    """What a host has sent over the link in an all-reduce of 4 MiB, and what its ranks say of themselves."""
    enter(hosts, rank // PER_HOST)
    meeting = (folder / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(minutes=1))
    group = RankGroup.connect(torch.device("cpu"), timedelta(seconds=20))
    collective = HierarchicalAllReduce(group)
    buffer = collective.allocate(4 * 2**20)
    group.exchange("all are here")
    before = hosts.bytes_sent(rank // PER_HOST)
    group.exchange("all have looked")
    collective.all_reduce(buffer).wait()
    group.exchange("all are done")
    sent = hosts.bytes_sent(rank // PER_HOST) - before
    collective.close()
    return sent, collective.bytes_sent


def test_the_kernel_counts_the_same_bytes_on_the_link(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        for sent, said in run_ranks(_counted, RANKS, hosts, tmp_path, init=False):
            assert PER_HOST * said == 4 * 2**20
            assert PER_HOST * said < sent < 1.05 * PER_HOST * said, "headers, and the words of the control group"


# -- failures --------------------------------------------------------------------------------------------------------


def outcomes_of(options: Options, folder: Path, seconds: float) -> list[Outcome]:
    """Train on ranks that cannot all succeed, and see how each ends."""
    with two_hosts() as hosts, pytest.raises(RanksFailedError) as failure:
        run_ranks(train_on_hosts, RANKS, hosts, folder, options, init=False, timeout=100.0, grace=seconds)
    assert not [outcome.rank for outcome in failure.value.outcomes if "still running" in str(outcome.error)]
    return failure.value.outcomes


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_cut_link_ends_all_ranks_with_the_name_of_the_other_host(rank: int, tmp_path: Path) -> None:
    outcomes = outcomes_of(Options(cuts=rank, timeout=5.0), tmp_path, seconds=15.0)
    for outcome in outcomes:
        here, there = ("host-a", "host-b") if outcome.rank < PER_HOST else ("host-b", "host-a")
        # Ranks that sit in a collective of Lightning's own are ended without an exception.
        said = re.sub(r"\s+", " ", f"{outcome.error} {outcome.output}")
        assert re.search(rf"rank \d failed first \(pid \d+ on {there}, as seen by rank \d .*no sign of life", said), (
            outcome
        )
        assert f"the link between {there} and {here} is cut" in said, outcome


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_raises_ends_the_ranks_of_the_other_host(rank: int, tmp_path: Path) -> None:
    for outcome in outcomes_of(Options(raises=rank), tmp_path, seconds=10.0):
        expected = (
            rf"rank {rank} failed first \(pid \d+ on host-[ab], train, epoch 0, step 2\): ValueError: boom-on-rank-"
        )
        assert re.search("ValueError: boom-on-rank-" if outcome.rank == rank else expected, str(outcome.error)), outcome


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_on_the_other_host(rank: int, tmp_path: Path) -> None:
    for outcome in outcomes_of(Options(killed=rank), tmp_path, seconds=10.0):
        if outcome.rank == rank:
            assert "was killed by SIGKILL" in str(outcome.error)
            continue
        host = "host-a" if rank < PER_HOST else "host-b"
        said = f"{outcome.error} {outcome.output}"
        assert re.search(rf"rank {rank} failed first \(pid \d+ on {host}, .*the process is gone", said), outcome


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_launched_training_ends_on_both_hosts_after_the_link_was_cut(tmp_path: Path) -> None:
    """Symptom: processes wait at exit until what the backend had begun times out, which takes minutes."""
    with two_hosts() as hosts, launched(hosts, "lightning", tmp_path, "cuts=0", "timeout=5", "meets=1") as started:
        completed = [one.finish(timeout=110.0) for one in started]
    for host, one in enumerate(completed):
        there = ("host-b", "host-a")[host]
        assert one.returncode == 1, one
        assert not one.leftover_pids, one
        assert re.search(rf"rank \d failed first \(pid \d+ on {there}, .*no sign of life from {there}", one.stderr), one
