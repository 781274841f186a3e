"""The doctor's findings: what they are made of, and the exit status."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from ringstrategy import self_test as self_test_module
from ringstrategy.bench import BenchError
from ringstrategy.cli.main import main
from ringstrategy.doctor import Finding, examine, judge
from ringstrategy.self_test import Trial, self_test
from tests.helpers.scripts import run_script

_COMMAND = "import sys\nfrom ringstrategy.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def _found(topic: str, environ: dict[str, str]) -> Finding:
    (finding,) = [finding for finding in examine(environ) if finding.topic == topic]
    return finding


def test_a_plain_environment_is_fine() -> None:
    findings = examine({})
    assert [finding for finding in findings if finding.state == "broken"] == []
    topics = [finding.topic for finding in findings]
    assert len(set(topics)) == len(topics)
    assert {"backend", "launcher", "hosts", "interfaces", "threads", "locked memory", "shared memory"} <= set(topics)
    assert all(finding.text.endswith(".") and len(finding.text) < 250 for finding in findings)
    assert "lo (127.0.0.1)" in _found("interfaces", {}).text


def test_where_ranks_meet() -> None:
    assert _found("hosts", {}).state == "ok"
    assert (
        "MASTER_ADDR=127.0.0.1 (127.0.0.1); this is node 1"
        in _found("hosts", {"MASTER_ADDR": "127.0.0.1", "NODE_RANK": "1"}).text
    )
    unknown = _found("hosts", {"MASTER_ADDR": "nowhere.invalid"})
    assert (unknown.state, "MASTER_ADDR=nowhere.invalid is no address" in unknown.text) == ("broken", True)


def test_the_port() -> None:
    address = {"MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as sock:
        sock.bind(("", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        taken = _found("port", address | {"MASTER_PORT": port})
        assert (taken.state, "Address already in use" in taken.text) == ("note", True)
        assert _found("port", address | {"MASTER_PORT": port, "NODE_RANK": "1"}).state == "ok"
    for wrong in ("0", "70000", "http"):
        assert _found("port", address | {"MASTER_PORT": wrong}).state == "broken"


@pytest.mark.parametrize(
    ("name", "state"), [("lo", "ok"), ("nosuch0", "broken"), ("lo,nosuch0", "broken"), ("^docker0", "ok")]
)
def test_interfaces_that_are_asked_for(name: str, state: str) -> None:
    assert _found("NCCL_SOCKET_IFNAME", {"NCCL_SOCKET_IFNAME": name}).state == state


def test_trials_are_judged() -> None:
    worked = [Trial("shared_memory", "cpu", 2, seconds=0.001), Trial("backend", "cpu", 2, seconds=0.002)]
    findings = judge(worked)
    assert [finding.state for finding in findings] == ["ok"] * 3
    assert findings[0].text == "2 ranks on cpu summed 4.00 MiB by shared_memory in 1.00 ms."
    assert findings[-1].text.startswith("CPU ranks of one host: shared memory.")
    blocked = judge([Trial("shared_memory", "cpu", 2, obstacle="no memfd"), worked[1]])
    assert [finding.state for finding in blocked] == ["note", "ok", "ok"]
    assert "cannot use shared_memory: no memfd." in blocked[0].text
    assert blocked[-1].text == "CPU ranks: gloo, also within one host."
    broken = judge([Trial("gloo", "cpu", 2, error="no route")])
    assert [(finding.state, finding.text) for finding in broken] == [("broken", "2 ranks on cpu, gloo: no route")]


def test_ranks_that_do_not_meet_are_one_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BenchError("Traceback\n  somewhere\nRuntimeError: no route to host\n")

    monkeypatch.setattr(self_test_module, "run_ranks", fail)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert self_test() == [Trial("gloo", "cpu", 2, error="RuntimeError: no route to host")]


def test_the_exit_status_and_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    words = ["doctor", "--no-self-test", "--json", str(file)]
    assert main(words) == 0
    assert json.loads(file.read_text())["broken"] == 0
    assert "All is well." in capsys.readouterr().out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(words) == 1
    document = json.loads(file.read_text())
    assert document["broken"] == 1
    assert document["self_test"] == []
    assert "there is no interface nosuch0 here" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_really_start(tmp_path: Path) -> None:
    ended = run_script(_COMMAND, "doctor", "--json", "doctor.json", cwd=tmp_path, timeout=100.0)
    assert ended.returncode == 0, ended
    assert ended.leftover_pids == (), ended
    trials = json.loads((tmp_path / "doctor.json").read_text())["self_test"]
    assert [(trial["collective"], trial["error"]) for trial in trials[:2]] == [
        ("shared_memory", None),
        ("backend", None),
    ]
    assert all(trial["seconds"] > 0 for trial in trials)
