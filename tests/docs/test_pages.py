"""Links of all pages lead somewhere, their figures are those of the code, and they can be built."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.constants import default_pg_timeout

from ringstrategy import allocator, host_links
from ringstrategy.collectives import hierarchical, host_memory, shared_memory
from ringstrategy.failure import FailureMonitor
from ringstrategy.gradients.buckets import MIB, plan_buckets
from ringstrategy.strategies import ring_ddp
from tests.docs.markdown import anchors, links

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *DOCS.glob("[!_]*/**/*.md"), ROOT / "recipes" / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        assert ROOT in target.parents, f"{page.name} links to {link}, which lies outside"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}, which has no such heading"


def _default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


# What the code has, as the pages put it.
_SHARED, _OTHERWISE = f"{ring_ddp._SHARED_MEMORY_CAP_MB:g}", f"{ring_ddp._BACKEND_CAP_MB:g}"
_TIMEOUT = f"{default_pg_timeout.total_seconds() / 60:g} minutes by default"
_WARNED = f"after {_default(FailureMonitor, 'warn_after'):g} s"
_GRACE = f"{_default(FailureMonitor, 'grace'):g}"
_KEPT = f"blocks of up to {allocator._LARGEST_THRESHOLD // MIB} MiB"
FIGURES = [
    ("README.md", f"`None` is {_SHARED} over shared memory and {_OTHERWISE} otherwise"),
    ("README.md", _TIMEOUT),
    ("README.md", _KEPT),
    ("docs/limits.md", _TIMEOUT),
    ("docs/limits.md", _KEPT),
    ("docs/limits.md", f"{_GRACE} seconds after a failure"),
    ("docs/how-it-works.md", _KEPT),
    (
        "docs/how-it-works.md",
        f"At most {_SHARED} MiB over shared memory, which stays in cache, and {_OTHERWISE} MiB otherwise",
    ),
    ("docs/how-it-works.md", f"first bucket has at most {_default(plan_buckets, 'first_cap_bytes') // MIB} MiB"),
    ("docs/how-it-works.md", f"pieces of {shared_memory._SEGMENT_BYTES // 1024} KiB"),
    ("docs/how-it-works.md", f"before: {host_memory._BEGIN.size} bytes"),
    ("docs/how-it-works.md", _WARNED),
    ("docs/how-it-works.md", f"after {_GRACE} s"),
    ("docs/hosts.md", f"segments of {hierarchical._SEGMENT_BYTES // 1024} KiB"),
    ("docs/hosts.md", f"{ {3.0: 'three'}[host_links._QUIET_SECONDS] } seconds without a sign of life"),
]


@pytest.mark.parametrize(("page", "figure"), FIGURES)
def test_figures_are_those_of_the_code(page: str, figure: str) -> None:
    assert figure in " ".join((ROOT / page).read_text().split())


def test_the_pages_can_be_built(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", str(tmp_path / "doctrees")]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path / "html")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for page in (page for page in PAGES if DOCS in page.parents):
        assert (tmp_path / "html" / page.relative_to(DOCS).with_suffix(".html")).is_file()
