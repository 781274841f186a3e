"""Hooks on parameters that turn each rank's gradients into their mean, while backward goes on.

    backward ──▶ gradient ready ──▶ copied into its bucket ──▶ bucket full ──▶ all-reduce starts, in bucket order
                                                                                 │
    optimizer ◀── .grad is a view of the bucket, now the mean ◀── finish: wait ◀─┘

Invariant: whatever is in ``.grad`` when an optimizer steps is the mean over ranks, averaged once.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.hooks import RemovableHandle

from ringstrategy.collectives.base import Collective
from ringstrategy.gradients.buckets import MIB, plan_buckets
from ringstrategy.gradients.live import Gradient, LiveBucket, lay_out, lives_in
from ringstrategy.gradients.sparse import mean_of_sparse
from ringstrategy.process_group import RankGroup

__all__ = ["GradientReducer"]


class GradientReducer:
    """Averages the gradients of parameters over the ranks.

    The first backward only observes the order in which gradients arrive; rank 0's order makes the plan. From then on a
    bucket leaves as soon as its last gradient has arrived and all buckets before it have left. All ranks thus send the
    same buckets in the same order, whatever their own gradients do.

    Args:
        named_parameters: all parameters, also those that do not train (yet); the same on all ranks.
        sparse: names of parameters whose gradients are sparse.
        collective: sums buckets.
        group: the ranks.
        bucket_cap_bytes: most bytes of gradients in a bucket.
        waiting: context around every wait, given what is waited for.

    Attributes:
        exposed_seconds: time in which backward had ended and the means were not there yet.
        all_reduces: buckets sent so far.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        collective: Collective,
        group: RankGroup,
        *,
        sparse: frozenset[str] = frozenset(),
        bucket_cap_bytes: int = 25 * MIB,
        waiting: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        self._collective = collective
        self._group = group
        self._cap = bucket_cap_bytes
        self._scale = 1.0 / group.world_size
        self._gradients = [
            Gradient(index, name, parameter, sparse=name in sparse)
            for index, (name, parameter) in enumerate(named_parameters)
        ]
        self._frozen = list(self._gradients)  # never trained so far; autograd takes no hook on them
        self._hooked: list[Gradient] = []
        self._buckets: list[LiveBucket] = []
        self._order: list[int] = []  # in which gradients arrive, while observing
        self._observing = True
        self._launched = 0
        self._sync = True
        self._open = False  # a backward has produced gradients that are not averaged yet
        self._explicit = False  # whoever started the backward also ends it
        self._tasks: set[int] = set()  # backwards (nested ones too) at whose end the engine calls us
        self.exposed_seconds = 0.0
        self.all_reduces = 0
        self._waiting = waiting
        self.refresh()

    # -- for the strategy --------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in parameters that train now and did not before (unfrozen). Before a backward, on all ranks alike."""
        for gradient in [gradient for gradient in self._frozen if gradient.parameter.requires_grad]:
            gradient.hook = self._hook(gradient)
            self._frozen.remove(gradient)
            self._hooked.append(gradient)
            self._observing = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients accumulate locally; the next backward outside sends them. Nests."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: the means are there when it ends, also if this rank's loss touched no parameter."""
        before, self._explicit = self._explicit, True
        try:
            yield
        except BaseException:
            self._reset()
            raise
        finally:
            self._explicit = before
        if self._sync:
            self.finish()

    def flush(self) -> None:
        """Finish what a backward has left open. Before an optimizer steps."""
        if self._open:
            self.finish()

    def close(self) -> None:
        """Remove the hooks and make ``.grad`` private again: no gradient lives in memory that others read."""
        for gradient in self._gradients:
            if gradient.hook is not None:
                gradient.hook.remove()
                gradient.hook = None
            if lives_in(gradient.parameter.grad, gradient.view):
                gradient.parameter.grad = gradient.parameter.grad.detach().clone()
            gradient.view = gradient.bucket = None
        self._buckets.clear()
        self._hooked.clear()

    # -- during backward ---------------------------------------------------------------------------------------------

    def _hook(self, gradient: Gradient) -> RemovableHandle:
        def arrived(_: Tensor) -> None:
            gradient.dirty = True
            if self._sync:
                self._arrived(gradient)

        handle: RemovableHandle = gradient.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return handle

    def _arrived(self, gradient: Gradient) -> None:
        self._open = True
        if not self._explicit:
            self._call_at_end()
        gradient.fired += 1
        if self._observing:
            if gradient.fired == 1:
                self._order.append(gradient.index)
        elif gradient.fired == gradient.expected:
            if not gradient.sparse:
                self._stage(gradient)
                self._launch_full()
        elif gradient.staged:
            raise RuntimeError(
                f"Parameter '{gradient.name}' received a gradient {gradient.fired} times in one backward on rank "
                f"{self._group.rank}, but {gradient.expected} time(s) in the first; its bucket has left already. This "
                "happens where checkpointed segments that share parameters come and go. Use "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )

    def _stage(self, gradient: Gradient) -> None:
        """Copy a gradient into its bucket, scaled so that the sum over ranks is the mean."""
        view, bucket, local = gradient.view, gradient.bucket, gradient.parameter.grad
        assert view is not None
        assert bucket is not None
        assert local is not None
        if local.requires_grad:
            gradient.graph, local = local, local.detach()
        if lives_in(local, view):
            view.mul_(self._scale)
        elif local.layout == torch.strided:
            torch.mul(local, self._scale, out=view)
        else:
            torch.mul(local.to_dense(), self._scale, out=view)
        if gradient.graph is None:
            # The fresh gradient is free at once; nobody needs it any more.
            gradient.parameter.grad = view
        gradient.staged = True
        bucket.missing -= 1

    def _launch_full(self) -> None:
        while self._launched < len(self._buckets) and self._buckets[self._launched].missing == 0:
            bucket = self._buckets[self._launched]
            bucket.flags.fill_(1)
            self._launch(bucket, background=True)

    def _launch(self, bucket: LiveBucket, background: bool) -> None:
        bucket.work = self._collective.all_reduce(bucket.flat, background)
        self._launched += 1
        self.all_reduces += 1

    def _call_at_end(self) -> None:
        """Have the engine call back at the end of this backward, nested or not."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        # A backward inside another (reentrant checkpointing) is not the end.
        if self._open and not self._explicit and not _inside_backward(sys._getframe()):
            self.finish()

    # -- after backward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all buckets, and install the means. Collective."""
        begun = time.perf_counter()
        if self._observing:
            with self._waiting("the order of gradients"):
                self._make_plan()
        for bucket in self._buckets[self._launched :]:
            self._complete(bucket)
        for number, bucket in enumerate(self._buckets):
            assert bucket.work is not None
            with self._waiting(bucket.label(number)):
                bucket.work.wait()
        for bucket in self._buckets:
            self._install(bucket)
        for gradient in self._hooked:
            if gradient.sparse:
                with self._waiting(f"sparse gradient '{gradient.name}'"):
                    self._average_sparse(gradient)
        self._reset()
        self.exposed_seconds += time.perf_counter() - begun

    def _complete(self, bucket: LiveBucket) -> None:
        """Send a bucket, whatever this rank has of it."""
        if bucket.missing == 0:
            bucket.flags.fill_(1)
            self._launch(bucket, background=False)
            return
        used = []
        for gradient in bucket.gradients:
            grad = gradient.parameter.grad
            if not gradient.staged:
                if grad is None:
                    assert gradient.view is not None
                    gradient.view.zero_()
                    bucket.missing -= 1
                    gradient.dirty = False
                else:
                    if not gradient.dirty:
                        gradient.kept = grad.detach().clone() if lives_in(grad, gradient.view) else grad
                    self._stage(gradient)
            used.append(float(gradient.dirty))
        bucket.flags.copy_(torch.tensor(used))
        self._launch(bucket, background=False)

    def _install(self, bucket: LiveBucket) -> None:
        # How many ranks used each parameter: of interest only where this one did not. On CUDA, asking blocks the host.
        unused = not all(gradient.dirty for gradient in bucket.gradients)
        users = bucket.flags.real.tolist() if unused else []
        for place, gradient in enumerate(bucket.gradients):
            if not gradient.dirty:
                gradient.parameter.grad = gradient.view if users[place] else gradient.kept
            elif gradient.graph is not None:
                assert gradient.view is not None
                with torch.enable_grad():
                    gradient.parameter.grad = _WithValue.apply(gradient.graph, gradient.view)
            gradient.kept = gradient.graph = None

    def _average_sparse(self, gradient: Gradient) -> None:
        parameter = gradient.parameter
        mean = mean_of_sparse(self._group, parameter.grad, gradient.dirty, parameter.detach())
        if mean is not None:
            parameter.grad = mean
        self.all_reduces += 1

    def _reset(self) -> None:
        if not self._open and self._launched == 0:
            return
        for gradient in self._hooked:
            gradient.fired = 0
            gradient.dirty = gradient.staged = False
        for bucket in self._buckets:
            bucket.missing = len(bucket.gradients)
            bucket.work = None
        self._launched = 0
        self._order.clear()
        self._tasks.clear()
        self._open = False

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> None:
        """Agree on order and counts with the other ranks, and lay out the buckets."""
        mine = (
            self._order,
            {g.index: g.fired for g in self._hooked},
            {g.index for g in self._hooked if g.parameter.grad is not None and g.parameter.grad.is_sparse},
        )
        everyone = self._group.exchange(mine)
        order = everyone[0][0]
        for gradient in self._hooked:
            gradient.expected = max(1, *(fired.get(gradient.index, 0) for _, fired, _ in everyone))
            gradient.sparse |= any(gradient.index in sparse for _, _, sparse in everyone)
        # What some rank did not use may come late or never; it must not hold up the rest.
        always = dict.fromkeys(index for index in order if all(fired[index] for _, fired, _ in everyone))
        rest = [g.index for g in reversed(self._gradients) if g.hook is not None and g.index not in always]
        groups = [[self._gradients[index] for index in indices] for indices in (always, rest)]
        plan = plan_buckets([[g.spec for g in group if not g.sparse] for group in groups], self._cap)
        self._buckets = lay_out(plan, self._collective.allocate(plan.nbytes), self._gradients)
        self._observing = False


class _WithValue(torch.autograd.Function):
    """The mean as a value, with the local gradient's graph for derivatives of higher order."""

    @staticmethod
    def forward(ctx: object, local: Tensor, mean: Tensor) -> Tensor:
        return mean.clone()

    @staticmethod
    def backward(ctx: object, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def _inside_backward(frame: FrameType | None) -> bool:
    """Whether this thread is running the backward of a Python-implemented autograd function."""
    inner = BackwardCFunction.apply.__code__
    while frame is not None:
        if frame.f_code is inner:
            return True
        frame = frame.f_back
    return False
