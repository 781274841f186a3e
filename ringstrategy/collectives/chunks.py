"""Who reduces and copies what at which step of the ring: index arithmetic only.

A buffer is cut into blocks that stay in cache, a block into one chunk per rank. In every block the chunks travel round
the ring twice (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009):

    reduce-scatter, 4 ranks, the chunk that each rank adds from its left neighbour:

              rank 0      rank 1      rank 2      rank 3
      t = 0   chunk 3     chunk 0     chunk 1     chunk 2
      t = 1   chunk 2     chunk 3     chunk 0     chunk 1
      t = 2   chunk 1     chunk 2     chunk 3     chunk 0      now rank r holds the sum of chunk r + 1

    all-gather, the chunk that each rank copies from its left neighbour:

      t = 3   chunk 0     chunk 1     chunk 2     chunk 3
      t = 4   chunk 3     chunk 0     chunk 1     chunk 2
      t = 5   chunk 2     chunk 3     chunk 0     chunk 1

Each step moves 1/N of the buffer, so 2(N - 1) steps move 2(N - 1)/N of it per rank, whatever the number of ranks.
A chunk is summed in one order, once, and then copied: all ranks end with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Step", "ring_steps", "split"]


@dataclass(frozen=True, slots=True)
class Step:
    """One action of one rank.

    Attributes:
        start: first element.
        stop: one past the last element.
        reduce: add the left neighbour's elements (reduce-scatter) rather than copy them (all-gather).
        after: how many announced steps of the same buffer the left neighbour must have completed before.
        announce: tell the right neighbour, who needs the outcome. The last step of a block is nobody's input.
    """

    start: int
    stop: int
    reduce: bool
    after: int
    announce: bool


def split(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """Cut ``[start, stop)`` into ``parts`` contiguous pieces whose lengths differ by at most one.

    >>> split(0, 10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    quotient, remainder = divmod(stop - start, parts)
    pieces = []
    for part in range(parts):
        end = start + quotient + (part < remainder)
        pieces.append((start, end))
        start = end
    return pieces


def ring_steps(rank: int, world_size: int, numel: int, chunk: int) -> list[Step]:
    """The steps of one rank for one all-reduce, in the order in which it takes them.

    Blocks are software-pipelined: in wave ``w`` a rank takes step 0 of block ``w``, step 1 of block ``w - 1`` and so
    on, so what a step needs from the left was finished a whole wave earlier and nobody waits. The order is the same on
    all ranks, so a count of completed steps says everything about a neighbour's progress.

    Args:
        rank: this rank.
        world_size: number of ranks.
        numel: length of the buffer in elements.
        chunk: most elements of one step.

    Returns:
        ``2 * (world_size - 1)`` steps for each block of ``world_size * chunk`` elements.
    """
    block = world_size * chunk
    chunks = [split(start, min(start + block, numel), world_size) for start in range(0, numel, block)]
    rounds = 2 * (world_size - 1)
    order = [
        (wave - t, t) for wave in range(len(chunks) + rounds - 1) for t in range(rounds) if 0 <= wave - t < len(chunks)
    ]
    announced = [step for step in order if step[1] < rounds - 1]
    position = {step: count for count, step in enumerate(announced, start=1)}
    steps = []
    for index, t in order:
        start, stop = chunks[index][(rank - t - 1) % world_size]
        after = position[index, t - 1] if t else 0
        steps.append(Step(start, stop, reduce=t < world_size - 1, after=after, announce=t < rounds - 1))
    return steps
