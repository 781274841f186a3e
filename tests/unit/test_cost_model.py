"""The cost model finds the coefficients that made the times, and says where it goes beyond them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ringstrategy.cli.main import main
from ringstrategy.cli.simulate import parse_bandwidth, parse_seconds
from ringstrategy.cost_model import CostModel, Link, Sample, fit, hierarchical_seconds, hold_out, read_samples
from ringstrategy.step_model import StepModel, bucketed, read_step

_SIZES = tuple(2**power for power in range(16, 27, 2))
_RING = CostModel("ring", (2e-5, 0.0, 3e-5), (1e-9, 2e-10, 0.0), 5e-10, 2**22, 2, (2, 4), (2**16, 2**26))
_TREE = CostModel("tree", (2e-5, 0.0, 0.0), (1e-9, 0.0, 0.0), 0.0, 2**22, 8, (2, 8), (2**16, 2**26))
_NAIVE = CostModel("naive", (4e-5, 0.0, 0.0), (1e-9, 0.0, 0.0), 0.0, 2**22, 8, (2, 8), (2**16, 2**26))


def _samples(model: CostModel, ranks: tuple[int, ...], noise: float = 0.0) -> list[Sample]:
    """What the model would measure, now above it, now below."""
    signs = itertools.cycle((1, -1, -1, 1, 1))
    return [
        Sample(model.collective, n, size, model.seconds(n, size) * (1 + noise * next(signs)), model.cores)
        for n in ranks
        for size in _SIZES
    ]


def test_the_formulas_of_the_textbook() -> None:
    # 8 ranks, 1000 bytes; a = 20 us and b = 1 ns, or 40 us for the naive one.
    assert _TREE.seconds(8, 1000) == pytest.approx(2 * 3 * 2e-5 + 2 * 1000e-9)
    assert _TREE.seconds(7, 1000) == pytest.approx(2 * 2 * 2e-5 + 2 * 1000e-9)
    assert _NAIVE.seconds(8, 1000) == pytest.approx(14 * 4e-5 + 14 * 1000e-9)
    # 4 ranks on 2 cores: each message 20 + 30 us; each byte 1 + 4 * 0.2 ns, and 0.5 more beyond 4 MiB.
    expected = 6 * 5e-5 + 1.5 * (1.8e-9 * 2**23 + 5e-10 * 2**22)
    assert _RING.seconds(4, 2**23) == pytest.approx(expected)
    assert _RING.seconds(1, 2**23) == 0.0


@pytest.mark.parametrize("model", [_RING, _TREE, _NAIVE], ids=lambda model: model.collective)
def test_a_fit_predicts_what_it_has_not_seen(model: CostModel) -> None:
    samples = _samples(model, (2, 3, 4), noise=0.05)
    seen, held = hold_out(samples)
    assert {sample.ranks for sample in seen} == {2, 4}
    assert {sample.nbytes for sample in seen} == {_SIZES[0], _SIZES[2], _SIZES[4], _SIZES[5]}
    assert len(seen) + len(held) == len(samples)
    fitted = fit(seen)
    for sample in held:
        # The ring's knee is among what was held out.
        tolerance = 0.25 if model is _RING else 0.12
        assert fitted.seconds(sample.ranks, sample.nbytes) == pytest.approx(sample.seconds, rel=tolerance)
    assert min(*fitted.message, *fitted.byte, fitted.beyond) >= 0


def test_an_exact_fit_and_a_term_that_is_not_needed() -> None:
    fitted = fit(_samples(_TREE, (2, 4, 8)))
    assert fitted.message == pytest.approx(_TREE.message, abs=1e-9)
    assert fitted.byte == pytest.approx(_TREE.byte, abs=1e-13)
    assert fitted.beyond == 0


def test_one_number_of_ranks_says_nothing_of_what_grows_with_them() -> None:
    fitted = fit(_samples(_RING, (2,)))
    assert fitted.message[1:] == fitted.byte[1:] == (0.0, 0.0)
    assert fitted.extrapolates(2, 2**20) == []
    assert fitted.extrapolates(3, 2**20) == ["ranks"]
    assert fitted.extrapolates(2, 2**30, hosts=2) == ["size", "link"]
    with pytest.raises(ValueError, match="one size only"):
        fit(_samples(_RING, (2,))[:1])
    assert hold_out(_samples(_RING, (2,))[:2])[1] == []


def test_a_slow_link_takes_what_the_bytes_take() -> None:
    link = Link(bandwidth=125e6, latency=1e-4)
    nbytes = 25 * 2**20
    # The count of a ring: 2(N - 1)/N of the buffer leaves each host, whoever shares it.
    wire = 1.5 * nbytes / 125e6
    assert _RING.seconds(4, nbytes, hosts=2, link=link) == pytest.approx(wire + 6 * (2e-5 + 1e-4))
    # A fast one costs what handling costs.
    assert _TREE.seconds(2, nbytes, 2, Link(1e12)) == pytest.approx(_TREE.seconds(2, nbytes))
    # Rank 0 sends to, and receives from, the two ranks of the other host.
    assert _NAIVE.seconds(4, nbytes, 2, link) == pytest.approx(4 * nbytes / 125e6 + 6 * (4e-5 + 1e-4))
    # Between hosts only one buffer each: the advantage that bytes allow, 1.5.
    memory = CostModel("shared_memory", (0.0, 0.0, 0.0), (1e-11, 0.0, 0.0), 0.0, 2**22, 2, (2, 4), (2**16, 2**26))
    ratio = _RING.seconds(4, nbytes, 2, link) / hierarchical_seconds(memory, _RING, 4, nbytes, 2, link)
    assert ratio == pytest.approx(1.5, rel=0.01)


def test_reading_is_tolerant_but_not_of_nothing() -> None:
    row = {"collective": "ring", "ranks": 2, "bytes": 1024, "median_s": 0.5, "new": [1]}
    others = [{"strategy": "ddp"}, None, row | {"hosts": 2}, row | {"collective": "hierarchical"}, row | {"ranks": 1}]
    document = {"environment": {"cores": 8}, "rows": [row, *others]}
    assert read_samples(document) == [Sample("ring", 2, 1024, 0.5, 8)]
    assert read_samples({"rows": [row]})[0].cores > 1000
    nothing: Any
    for nothing in (None, [], {}, {"rows": []}, {"rows": "ring"}, {"rows": others}):
        with pytest.raises(ValueError, match="bench all-reduce --json"):
            read_samples(nothing)


def _step_document(**ours: Any) -> dict[str, Any]:
    rows = [
        {"strategy": "ring_ddp", "model": "mlp", "ranks": 2, "median_s": 0.12, "all_reduce_s": 0.08, "exposed_s": 0.02},
        {"strategy": "none+keep", "model": "mlp", "ranks": 2, "median_s": 0.09},
    ]
    return {"environment": {"cores": 2}, "rows": [rows[0] | ours, rows[1]]}


def test_a_step() -> None:
    step = read_step(_step_document())
    assert step == StepModel(0.09, 1 - 0.02 / 0.08, "mlp", 2, 2)
    # A quarter of the all-reduces is not hidden, and what takes longer than backward, two thirds of 90 ms, is not.
    assert step.seconds(2, 0.04) == pytest.approx(0.10)
    assert step.seconds(2, 0.2) == pytest.approx(0.09 + 0.14)
    assert step.efficiency(2, 0.04) == pytest.approx(0.9)
    # Four ranks take turns on two cores.
    assert step.seconds(4, 0.0) == pytest.approx(0.18)
    alone = read_step({"rows": _step_document()["rows"][:1]})
    assert alone.compute_s == pytest.approx(0.10)
    for nothing in ({}, {"rows": [{"strategy": "ddp", "median_s": 1.0}]}, {"rows": [{"strategy": "none"}]}):
        with pytest.raises(ValueError, match="bench train-step --json"):
            read_step(nothing)
    assert bucketed(lambda size: 1.0 + size, 10.0, 4.0) == pytest.approx(3 + 10)


def test_quantities() -> None:
    assert parse_bandwidth("1Gbit") == 125e6
    assert parse_bandwidth("1.5 GB") == 1.5e9
    assert parse_seconds("50us") == pytest.approx(5e-5)
    for text in ("", "1", "1 parsec", "-1ms", "0s"):
        with pytest.raises(ValueError, match="is no time"):
            parse_seconds(text)


def _write(folder: Path, model: CostModel, ranks: int) -> str:
    rows = [
        {"collective": name, "ranks": ranks, "bytes": sample.nbytes, "median_s": sample.seconds * factor}
        for name, factor in (("shared_memory", 0.1), ("backend", 1.0))
        for sample in _samples(model, (ranks,))
    ]
    path = folder / f"{ranks}.json"
    path.write_text(json.dumps({"environment": {"cores": 2}, "rows": rows}))
    return str(path)


def test_the_command_predicts_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [_write(tmp_path, _RING, ranks) for ranks in (2, 3, 4)]
    (tmp_path / "step.json").write_text(json.dumps(_step_document()))
    out = tmp_path / "out.json"
    link = ["--hosts", "1,2", "--bandwidth", "1Gbit"]
    step = ["--train-step", str(tmp_path / "step.json"), "--gradients", "40MiB"]
    assert main(["simulate", *files, "--ranks", "4,8", "--sizes", "1MiB", *link, *step, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "20 of 20 within 25%" in shown
    document = json.loads(out.read_text())
    assert all(abs(check["error"]) < 0.25 for check in document["checks"])
    by_place = {(each["ranks"], each["hosts"]): each for each in document["predictions"]}
    assert by_place[4, 1]["extrapolated"] == {"shared_memory": [], "backend": []}
    assert by_place[8, 1]["extrapolated"]["backend"] == ["ranks"]
    assert set(by_place[4, 2]["seconds"]) == {"backend", "hierarchical"}
    assert by_place[4, 1]["seconds"]["backend"] == pytest.approx(_RING.seconds(4, 2**20), rel=0.05)
    assert [(each["ranks"], each["hosts"], each["collective"]) for each in document["steps"]] == [
        (4, 1, "shared_memory"),
        (8, 1, "shared_memory"),
        (4, 2, "hierarchical"),
        (8, 2, "hierarchical"),
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--hosts", "2"], "several hosts need --bandwidth"),
        (["--train-step", "{bench}"], "no rows 'none' or 'ring_ddp'"),
    ],
)
def test_what_is_missing_is_told_in_a_line(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = _write(tmp_path, _RING, 2)
    assert main(["simulate", bench, *(word.format(bench=bench) for word in words)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_file_that_is_none_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.json").write_text("no json")
    for name in ("text.json", "missing.json"):
        with pytest.raises(SystemExit) as caught:
            main(["simulate", str(tmp_path / name)])
        assert caught.value.code == 2
    (tmp_path / "empty.json").write_text("{}")
    assert main(["simulate", str(tmp_path / "empty.json")]) == 2
    assert "empty.json: no rows of" in capsys.readouterr().err
