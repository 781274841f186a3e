"""What an all-reduce costs, from a few measurements: for other sizes, more ranks and other links.

The model is Hockney's: a message of n bytes takes a + b n, a the latency and b the time per byte (R. W. Hockney, "The
communication challenge for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20, 1994). How many messages and
bytes an all-reduce of n bytes over N ranks takes one after the other is known for each algorithm (R. Thakur,
R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH", International Journal of
High Performance Computing Applications 19, 2005):

    algorithm                     messages          bytes
    ring, backend, shared memory  2(N - 1)          2(N - 1)/N n
    tree                          2 floor(log2 N)   2 n
    naive                         2(N - 1)          2(N - 1) n

Their third term, the time to add a byte, grows with the same bytes; measurements of one algorithm cannot tell it from
b, which holds both. What is added to the textbook is used only where measurements ask for it. Ranks of one host share
its memory, and where there are more of them than cores they take turns; so a and b may grow with r, the ranks of a
host, and with o = max(0, r/cores - 1). Bytes beyond some size, the knee, may cost c more, since they fit in no cache:

    T = messages (a0 + a1 r + a2 o) + bytes (b0 + b1 r + b2 o) + bytes beyond the knee c

All coefficients are at least 0, and such that the squares of the relative errors are smallest.

Between hosts, a byte costs what it costs to handle, or what the link takes, whichever is more; a message costs the
link's latency besides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CostModel", "Link", "Sample", "fit", "hierarchical_seconds", "hold_out", "read_samples"]

# Times differ by about so much from run to run: a fit that is closer than this is no better.
_NOISE = 0.02
_TERMS = 7
_MANY = 2**20  # cores, where it is not known how many there were


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        collective: its name, e.g. ``"shared_memory"`` or ``"ring"``.
        ranks: how many there were, all on one host.
        nbytes: size of the buffer.
        seconds: of one all-reduce.
        cores: of the host.
    """

    collective: str
    ranks: int
    nbytes: int
    seconds: float
    cores: int = _MANY


def read_samples(document: Any) -> list[Sample]:
    """Take the measurements out of what ``ringstrategy bench all-reduce --json`` wrote.

    Args:
        document: the parsed file. Rows of several hosts, and what is not known, are passed over.

    Raises:
        ValueError: there are none in it.
    """
    rows, environment = (
        document.get(key) if isinstance(document, Mapping) else None for key in ("rows", "environment")
    )
    cores = environment.get("cores") if isinstance(environment, Mapping) else None
    samples = []
    for row in rows if isinstance(rows, list) else []:
        try:
            sample = Sample(
                str(row["collective"]),
                int(row["ranks"]),
                int(row["bytes"]),
                float(row["median_s"]),
                cores if isinstance(cores, int) and cores > 0 else _MANY,
            )
        except (KeyError, TypeError, ValueError):
            continue
        one_host = row.get("hosts", 1) == 1 and sample.collective != "hierarchical"
        if one_host and sample.ranks > 1 and sample.nbytes > 0 and sample.seconds > 0:
            samples.append(sample)
    if not samples:
        raise ValueError("no rows of `ringstrategy bench all-reduce --json FILE` are in it")
    return samples


@dataclass(frozen=True)
class Link:
    """What connects the hosts.

    Attributes:
        bandwidth: of a host, in bytes per second and direction.
        latency: seconds until the first byte is there.
    """

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """The time of one collective.

    Attributes:
        collective: its name.
        message: seconds per message: a0, a1 and a2.
        byte: seconds per byte: b0, b1 and b2.
        beyond: seconds per byte beyond the knee.
        knee: size of a buffer from which on bytes cost more.
        cores: of a host.
        ranks: fewest and most ranks that were measured.
        sizes: smallest and largest buffer that was measured.
    """

    collective: str
    message: tuple[float, float, float]
    byte: tuple[float, float, float]
    beyond: float
    knee: int
    cores: int
    ranks: tuple[int, int]
    sizes: tuple[int, int]

    def seconds_per_message(self, here: int) -> float:
        """With so many ranks on the host."""
        return _dot(self.message, _crowd(here, self.cores))

    def seconds_per_byte(self, here: int) -> float:
        """With so many ranks on the host, below the knee."""
        return _dot(self.byte, _crowd(here, self.cores))

    def seconds(self, ranks: int, nbytes: float, hosts: int = 1, link: Link | None = None) -> float:
        """The time of an all-reduce.

        Args:
            ranks: over all hosts.
            nbytes: size of the buffer.
            hosts: which have equally many ranks, or nearly so.
            link: between them; needed where there are several.
        """
        if ranks < 2:
            return 0.0
        here = -(-ranks // hosts)
        messages, share = _messages(self.collective, ranks), _share(self.collective, ranks)
        latency = messages * self.seconds_per_message(here)
        handling = share * (self.seconds_per_byte(here) * nbytes + self.beyond * max(0.0, nbytes - self.knee))
        if hosts == 1:
            return latency + handling
        assert link is not None
        wire = _share_of_link(self.collective, ranks, here) * nbytes / link.bandwidth
        return latency + messages * link.latency + max(handling, wire)

    def extrapolates(self, ranks: int, nbytes: float, hosts: int = 1) -> list[str]:
        """In which ways a prediction goes beyond what was measured: ``"ranks"``, ``"size"``, ``"link"``."""
        reasons = []
        if not self.ranks[0] <= ranks <= self.ranks[1]:
            reasons.append("ranks")
        if not self.sizes[0] <= nbytes <= self.sizes[1]:
            reasons.append("size")
        if hosts > 1:
            reasons.append("link")
        return reasons


def hierarchical_seconds(
    memory: CostModel, messages: CostModel, ranks: int, nbytes: float, hosts: int, link: Link
) -> float:
    """The time with shared memory inside each host and one lane per rank between hosts, one after the other.

    Args:
        memory: of the all-reduce over shared memory.
        messages: of one over messages.
        ranks: over all hosts.
        nbytes: size of the buffer.
        hosts: how many.
        link: between them.
    """
    here = -(-ranks // hosts)
    latency = 2 * (hosts - 1) * (messages.seconds_per_message(here) + link.latency)
    share = 2 * (hosts - 1) / hosts
    handling = share * nbytes / here * messages.seconds_per_byte(here)
    return memory.seconds(here, nbytes) + latency + max(handling, share * nbytes / link.bandwidth)


# -- the formulas ----------------------------------------------------------------------------------------------------


def _messages(collective: str, ranks: int) -> int:
    """Messages one after the other."""
    return 2 * (ranks.bit_length() - 1) if collective == "tree" else 2 * (ranks - 1)


def _share(collective: str, ranks: int) -> float:
    """Bytes one after the other, in sizes of the buffer."""
    if collective == "tree":
        return 2.0
    return 2.0 * (ranks - 1) / (1 if collective == "naive" else ranks)


def _share_of_link(collective: str, ranks: int, here: int) -> float:
    """Bytes through the link of the busiest host, in sizes of the buffer; the root's under ``naive``."""
    return 2.0 * (ranks - here) if collective == "naive" else _share(collective, ranks)


def _crowd(here: int, cores: int) -> tuple[float, float, float]:
    """What the coefficients of messages and bytes are multiplied by, with so many ranks on one host."""
    return 1.0, float(here), max(0.0, here / cores - 1)


def _dot(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(coefficient * term for coefficient, term in zip(coefficients, terms, strict=True))


# -- the fit ---------------------------------------------------------------------------------------------------------


def fit(samples: Sequence[Sample]) -> CostModel:
    """Fit the model to measurements of one collective.

    Args:
        samples: of at least two sizes.

    Raises:
        ValueError: there are too few.
    """
    collective = samples[0].collective
    sizes = sorted({sample.nbytes for sample in samples})
    ranks = sorted({sample.ranks for sample in samples})
    if len(sizes) < 2:
        raise ValueError(f"{collective} was measured with one size only; latency and bandwidth need at least two")
    # With one number of ranks nothing tells what grows with them.
    columns = range(_TERMS) if len(ranks) > 1 else (0, 3, 6)
    best: tuple[float, list[float], int] | None = None
    for knee in sizes[1:-1] or sizes[-1:]:
        terms = torch.tensor([_terms(sample, knee) for sample in samples], dtype=torch.float64)
        for chosen in _subsets([column for column in columns if terms[:, column].any()], at_most=len(samples) - 1):
            coefficients = _least_squares(terms[:, chosen])
            if min(coefficients) < 0:
                continue
            error = terms[:, chosen] @ torch.tensor(coefficients, dtype=torch.float64) - 1
            # Akaike's criterion: a further term must pay.
            score = len(samples) * math.log(float(error.square().mean()) + _NOISE**2) + 2 * len(chosen)
            if best is None or score < best[0]:
                by_column = dict(zip(chosen, coefficients, strict=True))
                best = score, [by_column.get(column, 0.0) for column in range(_TERMS)], knee
    assert best is not None  # one term alone always fits with a positive coefficient
    _, (a0, a1, a2, b0, b1, b2, beyond), knee = best
    return CostModel(
        collective,
        (a0, a1, a2),
        (b0, b1, b2),
        beyond,
        knee,
        samples[0].cores,
        ranks=(ranks[0], ranks[-1]),
        sizes=(sizes[0], sizes[-1]),
    )


def _terms(sample: Sample, knee: int) -> list[float]:
    """What the coefficients are multiplied by, in units of the measured time: their sum should be 1."""
    messages, share = _messages(sample.collective, sample.ranks), _share(sample.collective, sample.ranks)
    crowd = _crowd(sample.ranks, sample.cores)
    terms = [
        *(messages * each for each in crowd),
        *(share * sample.nbytes * each for each in crowd),
        share * max(0, sample.nbytes - knee),
    ]
    return [term / sample.seconds for term in terms]


def _subsets(columns: Sequence[int], at_most: int) -> Iterator[list[int]]:
    for count in range(1, min(len(columns), max(at_most, 1)) + 1):
        yield from map(list, itertools.combinations(columns, count))


def _least_squares(terms: torch.Tensor) -> list[float]:
    scale = terms.norm(dim=0)
    ones = torch.ones(len(terms), 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(terms / scale, ones, driver="gelsd").solution[:, 0] / scale
    return [float(value) for value in solution]


def hold_out(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Divide measurements of one collective into those to fit, and others to check the fit with.

    Every other size between the smallest and the largest is held out, and so is every other number of ranks.

    Returns:
        What to fit, and what to check; the latter is empty where there is nothing in between.
    """
    sizes = sorted({sample.nbytes for sample in samples})[1:-1:2]
    ranks = sorted({sample.ranks for sample in samples})[1:-1:2]
    held = [sample for sample in samples if sample.nbytes in sizes or sample.ranks in ranks]
    return [sample for sample in samples if sample not in held], held
