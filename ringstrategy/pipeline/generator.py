"""Random numbers inside a stage: other ones per stage and micro-batch, the same ones when it is computed again.

What is outside the pipelined module runs on all stages alike and must draw the same numbers there. So a stage draws its
own (dropout masks, say) under a seed that follows from who it is, and leaves the global generators as it found them.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from ringstrategy.pipeline.channels import Channel

__all__ = ["own_generators", "same_generators", "seed_of", "seeded_everywhere"]

# Odd constants spread neighbouring numbers over 64 bits (Steele et al., "Fast splittable pseudorandom number
# generators", 2014).
_GAMMA = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def seed_of(*numbers: int) -> int:
    """A seed that follows from ``numbers``: equal for equal ones, unrelated for others."""
    state = 0
    for number in numbers:
        state = (state + _GAMMA + number) & _MASK
        state = ((state ^ (state >> 30)) * _MIX[0]) & _MASK
        state = ((state ^ (state >> 27)) * _MIX[1]) & _MASK
        state ^= state >> 31
    return state


@contextlib.contextmanager
def own_generators(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Lend the default generators of the host and of ``device``; afterwards they are as before.

    Yields:
        A function that seeds both.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]

    def seed(value: int) -> None:
        for generator in generators:
            generator.manual_seed(value)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def same_generators(channels: Mapping[int, Channel], stage: int) -> None:
    """Give the state of the first stage's global generators to all stages. Collective.

    Those of torch on the host, of NumPy and of Python: what is drawn outside of the pipelined module from then on, for
    an augmentation or a mask, is the same on all stages.

    Args:
        channels: to the other stages.
        stage: this one.
    """
    tag = "generators"
    if stage == 0:
        for channel in channels.values():
            channel.send([torch.get_rng_state(), np.random.get_state(), random.getstate()], tag)
    else:
        state, numpy, python = channels[0].receive(tag)
        torch.set_rng_state(state)
        np.random.set_state(numpy)
        random.setstate(python)


@contextlib.contextmanager
def seeded_everywhere(seed: int, device: torch.device) -> Iterator[None]:
    """All global generators under a seed: torch's of the host and of ``device``, NumPy's and Python's.

    Afterwards they are as before. (``torch.manual_seed`` would take milliseconds where there is no GPU: it asks for the
    stack, to remember who wanted GPUs to be seeded.)
    """
    numpy, python = np.random.get_state(), random.getstate()
    with own_generators(device) as seed_torch:
        seed_torch(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)
