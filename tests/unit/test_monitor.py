"""From what was recorded to numbers, tables and traces."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringstrategy import RingMonitor
from ringstrategy.communication import Communication
from ringstrategy.monitor.costs import EpochRecord, RankCosts, StepCosts, bubble, compare, step_costs
from ringstrategy.monitor.metrics import epoch_metrics, step_metrics
from ringstrategy.monitor.parameter_check import check_parameters, digest
from ringstrategy.monitor.tables import costs_table, plan_table
from ringstrategy.monitor.trace import RankTrace, Span, chrome_trace, clock_offsets, in_lanes, write
from ringstrategy.monitor.tracer import Tracer
from ringstrategy.pipeline.schedules import Action
from ringstrategy.pipeline.table import as_text
from ringstrategy.process_group import ParameterMismatch
from ringstrategy.recorder import AllReduce, Arrival, BucketContents, Finish, MicroBatch, Recorded

_SPENT = Communication(all_reduces=2, bytes_sent=3 * 2**20, seconds=0.006, exposed_seconds=0.004, copy_seconds=0.001)


def _all_reduce(begun: float, ended: float, *arrivals: tuple[int, float], nbytes: int = 100) -> AllReduce:
    return AllReduce(nbytes, begun, tuple(Arrival(*arrival) for arrival in arrivals), ended - 0.001, ended)


def _recorded(*all_reduces: AllReduce, finish: tuple[float, float] | None = None) -> Recorded:
    finishes = [] if finish is None else [Finish(*finish, buckets=len(all_reduces))]
    return Recorded(list(all_reduces), finishes, [])


def test_only_what_is_waited_for_after_the_own_backward_counts() -> None:
    """Symptom: waiting that backward hides is shown as a loss."""
    hidden = _all_reduce(0.0, 0.4, (1, 0.2), (2, 0.3))
    half = _all_reduce(0.4, 0.9, (1, 0.40001), (2, 0.8))
    exposed = _all_reduce(1.0, 1.9, (1, 1.6), (2, 1.60001))  # 2 was there before 1, but is asked after it
    costs = step_costs(2.0, _SPENT, _recorded(hidden, half, exposed, finish=(0.5, 1.9)))
    assert costs.waited_seconds == pytest.approx(0.3 + 0.6)
    assert costs.slowest == 1
    assert costs.backward_ended == 0.5
    assert costs.all_reduce_seconds == _SPENT.seconds


def test_a_late_look_is_not_a_late_rank() -> None:
    """Symptom: the rank that is asked last is blamed when this one was held up between two looks."""
    held_up = _all_reduce(0.0, 0.04, (1, 0.030), (2, 0.031), (3, 0.0315))
    assert step_costs(1.0, _SPENT, _recorded(held_up, finish=(0.01, 0.04))).slowest == 1


def test_what_a_collective_does_not_tell_is_not_made_up() -> None:
    """Symptom: nobody was waited for, although nobody knows."""
    overlapping = [_all_reduce(0.0, 0.4), _all_reduce(0.1, 0.5), _all_reduce(0.2, 0.3), _all_reduce(0.7, 0.8)]
    costs = step_costs(1.0, Communication(), _recorded(*overlapping, finish=(0.3, 0.8)))
    assert costs.waited_seconds is None
    assert costs.slowest is None
    assert costs.all_reduce_seconds == pytest.approx(0.6), "the time in which at least one was under way"
    assert costs.bubble is None
    nothing = step_costs(1.0, Communication(), _recorded())
    assert math.isnan(nothing.backward_ended)
    assert nothing.all_reduce_seconds == 0.0


def _step(backward_ended: float = math.nan, computing: float = 0.0, computed: Sequence[float] = ()) -> StepCosts:
    begun, ended = computed or (math.nan, math.nan)
    return StepCosts(1.0, _SPENT, 0.006, 0.002, 1, backward_ended, computing, (begun, ended))


def test_ranks_wait_for_the_last_of_those_that_they_average_with() -> None:
    """Symptom: a clock that is ahead looks like a slow rank."""
    ends = [[1.0, 2.0, math.nan], [1.25, 1.5, 3.5], [101.125, 102.5, 103.0]]
    offsets = [0.0, 0.0, 100.0]
    records = [
        EpochRecord.of([_step(end) for end in of_rank], offset) for of_rank, offset in zip(ends, offsets, strict=True)
    ]
    costs = compare(records)
    assert [rank.waited_seconds for rank in costs] == pytest.approx([0.25 + 0.5, 1.0, 0.125])
    assert [rank.slowest for rank in costs] == [0, 1, 1]
    assert [rank.compared for rank in costs] == [2, 2, 2], "in the third step one rank averaged nothing"
    assert [rank.steps for rank in costs] == [3, 3, 3]
    assert costs[0].communication.bytes_sent == 9 * 2**20
    assert bubble(costs) is None


def test_the_bubble_of_replicas_of_a_pipeline() -> None:
    """Symptom: stages of another replica, or the offset of a clock, count as idle time."""
    steps = {
        0: [_step(5.0, 3.0, (0.0, 4.0)), _step(9.0, 1.0, (6.0, 8.0))],
        1: [_step(4.0, 2.0, (1.0, 3.0)), _step(9.0, 1.0, (7.0, 7.5))],
        2: [_step(5.5, 4.0, (10.0, 14.0)), _step(9.5, 2.0, (16.0, 18.0))],
        3: [_step(4.5, 4.0, (10.0, 14.0)), _step(9.0, 2.0, (16.0, 18.0))],
    }
    costs = compare([EpochRecord.of(of_rank, 0.0) for of_rank in steps.values()], stages=2)
    assert [rank.available for rank in costs] == [6.0, 6.0, 6.0, 6.0]
    assert bubble(costs[:2]) == pytest.approx(1 - (4.0 + 3.0) / 12)
    assert bubble(costs[2:]) == pytest.approx(0.0)
    assert [rank.waited_seconds for rank in costs] == pytest.approx([0.5 + 0.5, 0.5, 0.0, 0.0]), "by stage"


def test_costs_of_more_steps_add_up() -> None:
    """Symptom: an epoch is forgotten, or counted twice."""
    (one,) = compare([EpochRecord.of([_step(1.0), _step(2.0)], 0.0)])
    both = one.plus(one)
    assert (both.steps, both.seconds, both.communication.all_reduces) == (4, 4.0, 8)
    assert both.compared == 0, "alone"


def _costs(*, steps: int = 2, exposed: float = 0.004, slowest: int = 0) -> RankCosts:
    spent = _SPENT._replace(exposed_seconds=exposed)
    return RankCosts(steps, 0.1, spent, 0.006, 0.002, slowest, steps, 0.0, 0.0)


def test_metrics_are_per_step() -> None:
    """Symptom: a number grows with the number of steps between two logs."""
    assert step_metrics([_step(1.0), _step(2.0)]) == pytest.approx(
        {
            "ring/sent_MiB_step": 3.0,
            "ring/exposed_ms_step": 4.0,
            "ring/buckets_step": 2.0,
            "ring/all_reduce_ms_step": 6.0,
            "ring/busbw_GBps_step": 3 * 2**20 / 0.006 / 1e9,
            "ring/waited_ms_step": 2.0,
            "ring/slowest_rank_step": 1.0,
        }
    )
    assert epoch_metrics([_costs(), _costs(exposed=0.008, slowest=2)]) == pytest.approx(
        {
            "ring/sent_MiB_epoch": 1.5,
            "ring/exposed_ms_epoch": 3.0,
            "ring/buckets_epoch": 1.0,
            "ring/all_reduce_ms_epoch": 3.0,
            "ring/busbw_GBps_epoch": 3 * 2**20 / 0.006 / 1e9,
            "ring/waited_ms_epoch": 1.0,
            "ring/slowest_rank_epoch": 1.0,
        }
    )
    pipeline = step_metrics([_step(computing=3.0, computed=(1.0, 5.0))._replace(communication=Communication())])
    assert pipeline["ring/bubble_step"] == 0.25
    assert "ring/buckets_step" not in pipeline


def test_the_table_names_the_ranks_with_the_lowest_and_highest_costs() -> None:
    """Symptom: the mean hides that one rank waits for all."""
    text = as_text(costs_table([_costs(), _costs(exposed=0.008, slowest=2), _costs()], "title"))
    (line,) = [line for line in text.splitlines() if "not hidden" in line]
    assert "2.67 ms" in line
    assert "2.00 ms (rank 0)" in line
    assert "4.00 ms (rank 1)" in line
    (sent,) = [line for line in text.splitlines() if "sent" in line]
    assert "rank" not in sent, "equal on all"
    assert "slowest: rank 1, in 100% of 2 steps" in text


def test_the_plan_names_every_parameter() -> None:
    """Symptom: the parameter one looks for is behind an ellipsis."""
    names = tuple(f"network.layer{number}.weight" for number in range(40))
    text = as_text(plan_table([BucketContents(2**20, "bfloat16", names)]))
    joined = "".join(text.split())
    assert all(name in joined for name in names)
    assert "1.00 MiB" in text
    assert "bfloat16" in text


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda span: (float(span[0]), float(sum(span)))),
        max_size=20,
    )
)
def test_spans_of_a_lane_do_not_overlap(intervals: list[tuple[float, float]]) -> None:
    groups = [[Span("a", f"{n}", *interval), Span("a", "in", *interval)] for n, interval in enumerate(intervals)]
    placed = in_lanes(groups)
    assert len(placed) == 2 * len(groups)
    for lane in {span.lane for span in placed}:
        outer = sorted(span for span in placed if span.lane == lane and span.name != "in")
        times = sorted((span.begun, span.ended) for span in outer)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(times))


def test_a_trace_is_what_torch_profiler_would_write(tmp_path: Path) -> None:
    """Symptom: the viewer shows ranks as one process, or times that begin in 1970."""
    first = [Span("training", "forward", 10.0, 10.5, {"step": 0}), Span("all-reduce", "bucket 0", 10.25, 10.75)]
    write(tmp_path / "new" / "trace.json", [RankTrace("rank 0", first), RankTrace("rank 1", [first[1]])])
    trace = json.loads((tmp_path / "new" / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "M"}
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 1, 0] == {"name": "rank 1"}
    assert named["thread_name", 0, 1] == {"name": "all-reduce"}
    assert named["thread_name", 1, 0] == {"name": "all-reduce"}
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (0, 0, "forward", 0.0, 5e5),
        (0, 1, "bucket 0", 2.5e5, 5e5),
        (1, 0, "bucket 0", 2.5e5, 5e5),
    ]
    assert chrome_trace([]) == {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": []}


def test_clocks_of_hosts_are_compared_and_those_of_one_host_are_one() -> None:
    """Symptom: a late reading on one host shifts its ranks against each other."""
    first, second, third = [0.0, 1.0, 2.0], [0.5, 1.001, 2.001], [500.0, 501.5, 502.0]
    offsets = clock_offsets([first, second, third, [9.0, 9.0, 9.0]], ["a", "a", "b", "b"])
    assert offsets == [0.0, 0.0, 500.0, 500.0]


def test_a_tracer_shows_the_first_steps_with_all_that_was_recorded() -> None:
    """Symptom: a trace grows without end, or buckets have the names of others."""
    tracer = Tracer(1)
    plan = [BucketContents(100, "float32", ("b", "a")), BucketContents(100, "float32", ("c",))]
    reduced = [_all_reduce(1.0, 2.0, (1, 1.5)), _all_reduce(2.0, 3.0, (1, 2.1))]
    recorded = Recorded(reduced, [Finish(2.5, 3.0, 2)], [MicroBatch(Action("B", 3), 0.5, 0.75)])
    for _ in range(2):
        for phase in ("forward", "backward", None):
            tracer.turn_to(phase)
        tracer.end_step(recorded, plan)
    spans = tracer.spans(clock_offset=0.5)
    names = [span.name for span in spans]
    assert names.count("forward") == names.count("backward") == names.count("wait for gradients") == 1
    assert [name for name in names if name.startswith("bucket")] == ["bucket 0, 100 B", "bucket 1, 100 B"]
    by_name = {span.name: span for span in spans}
    assert by_name["bucket 0, 100 B"].details["parameters"] == ["b", "a"]
    assert by_name["backward 3"] == ("pipeline", "backward 3", 0.0, 0.25, {"step": 0})
    inside = [(span.name, span.begun, span.ended) for span in spans if span.lane == "all-reduce"][1:4]
    assert inside == [
        ("wait for rank 1", 0.5, 1.0),
        ("sum and hand out", 1.0, pytest.approx(1.499)),
        ("wait for the others", pytest.approx(1.499), 1.5),
    ]


def test_an_all_reduce_that_is_no_bucket_has_no_bucket_s_name() -> None:
    """Symptom: after an all-reduce of something else, names are shifted."""
    tracer = Tracer(1)
    plan = [BucketContents(100, "float32", ("a",))]
    tracer.end_step(Recorded([_all_reduce(0.0, 1.0), _all_reduce(1.0, 2.0)], [Finish(0.0, 2.0, 1)], []), plan)
    assert {span.name for span in tracer.spans(0.0) if "100 B" in span.name} == {"all-reduce, 100 B"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3, dtype=torch.bfloat16),
        torch.tensor(1 + 2j),
        torch.empty(0, 3),
        torch.tensor([math.nan, 1.0]),
        torch.tensor([True, False]),
    ],
)
def test_a_digest_depends_on_the_values_alone(tensor: torch.Tensor) -> None:
    """Symptom: equal parameters with other strides count as different, or a NaN does not equal itself."""
    assert digest(tensor) == digest(tensor.clone(memory_format=torch.contiguous_format))
    changed = tensor.flatten().clone()
    changed[:1] = 0 if tensor.dtype == torch.bool else 7
    assert (digest(changed) == digest(tensor)) == (tensor.numel() == 0)


def test_the_first_parameter_that_differs_is_named() -> None:
    """Symptom: ranks have drifted apart, and the error says no more."""
    mine = [("a", torch.zeros(2)), ("b.weight", torch.zeros(3, 2)), ("c", torch.zeros(1))]
    theirs = [digest(torch.zeros(2)), digest(torch.ones(3, 2)), digest(torch.ones(1))]
    check_parameters(mine, 0, lambda own: [own, own], "step 1")
    with pytest.raises(ParameterMismatch) as raised:
        check_parameters(mine, 0, lambda own: [own, own, (4, theirs)], "epoch 1, step 100")
    for part in ("At epoch 1, step 100", "'b.weight' of shape (3, 2)", "on rank 4", "rank 0", "2 of 3"):
        assert part in str(raised.value)


@pytest.mark.parametrize("arguments", [{"trace_steps": 0}, {"check_every": 0}, {"check_every": True}])
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, int]) -> None:
    """Symptom: zero steps are traced, and nobody says so."""
    with pytest.raises(ValueError, match=next(iter(arguments))):
        RingMonitor(**arguments)  # type: ignore[arg-type]
