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
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ringstrategy.collectives.base import Collective
from ringstrategy.gradients.autograd import inside_backward, with_value
from ringstrategy.gradients.buckets import MIB
from ringstrategy.gradients.layout import Layout
from ringstrategy.gradients.live import Gradient, LiveBucket, lives_in, set_aside
from ringstrategy.gradients.sparse import mean_of_sparse
from ringstrategy.process_group import RankGroup

__all__ = ["GradientReducer"]

_NOT_WEIGHTED = (
    "Parameter '{}' received a gradient from a backward that was not started by Lightning, so that its loss is not "
    "weighted as `average` or `uneven` ask for. Call `self.manual_backward(loss)` instead of `loss.backward()`."
)


class GradientReducer:
    """Averages the gradients of parameters over the ranks.

    The first backward only observes in which order gradients arrive and how often; rank 0's order makes the plan for
    all later ones. From then on a bucket leaves as soon as its last gradient has arrived and all buckets before it have
    left. All ranks thus send the same buckets in the same order, whatever their own gradients do.

    Args:
        named_parameters: all parameters, also those that do not train (yet); the same on all ranks.
        sparse: names of parameters whose gradients are sparse.
        collective: sums buckets.
        group: the ranks.
        bucket_cap_bytes: most bytes of gradients in a bucket.
        waiting: context around every wait, given what is waited for.
        weighted: losses are weighted before they go backward, which a plain ``loss.backward()`` would leave out.

    Attributes:
        exposed_seconds: time in which backward had ended and the means were not there yet.
        copy_seconds: time that copying gradients into buckets has added to backward; no part of the above. On CUDA the
            host does not wait for a copy: there it is only the time to start them.
        all_reduces: buckets sent so far.
        watch: called with the end of every backward, when the means were there, and the buckets; None while nobody
            asks.
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
        weighted: bool = False,
    ) -> None:
        self._collective = collective
        self._group = group
        self._scale = 1.0 / group.world_size
        self._gradients = [
            Gradient(index, name, parameter, sparse=name in sparse)
            for index, (name, parameter) in enumerate(named_parameters)
        ]
        self._frozen = list(self._gradients)  # never trained so far; autograd takes no hook on them
        self._hooked: list[Gradient] = []
        self._layout = Layout(self._gradients, collective, group, bucket_cap_bytes, waiting)
        self._launched = 0
        self._sync = True
        self._open = False  # a backward has produced gradients that are not averaged yet
        self._explicit = False  # whoever started the backward also ends it
        self._tasks: set[int] = set()  # backwards (nested ones too) at whose end the engine calls us
        self.exposed_seconds = 0.0
        self.copy_seconds = 0.0
        self.all_reduces = 0
        self.watch: Callable[[float, float, Sequence[LiveBucket]], None] | None = None
        self._waiting = waiting
        self._weighted = weighted
        self.refresh()

    # -- for the strategy --------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take in parameters that train now and did not before (unfrozen). Before a backward, on all ranks alike."""
        for gradient in [gradient for gradient in self._frozen if gradient.parameter.requires_grad]:
            gradient.hook = self._hook(gradient)
            self._frozen.remove(gradient)
            self._hooked.append(gradient)
            self._layout.observe()

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

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Gradients that a backward makes in here are forgotten, as if there had been none."""
        dirty = [gradient.dirty for gradient in self._hooked]
        try:
            with self.no_sync(), set_aside(gradient.parameter for gradient in self._hooked):
                yield
        finally:
            for gradient, before in zip(self._hooked, dirty, strict=True):
                gradient.dirty = before

    @torch.no_grad()
    def scale_accumulated(self, factor: float) -> None:
        """Multiply what is to be averaged by the next backward, and has been accumulated before it."""
        for gradient in self._hooked:
            if gradient.dirty and gradient.parameter.grad is not None:
                gradient.parameter.grad.mul_(factor)

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
        self._hooked.clear()
        self._layout.close()

    # -- during backward ---------------------------------------------------------------------------------------------

    def _hook(self, gradient: Gradient) -> RemovableHandle:
        def arrived(_: Tensor) -> None:
            if gradient.parameter.grad is None:
                return  # a function of autograd had none to give; torch calls all the same
            if self._weighted and not self._explicit:
                raise RuntimeError(_NOT_WEIGHTED.format(gradient.name))
            gradient.dirty = True
            if self._sync:
                self._arrived(gradient)

        handle: RemovableHandle = gradient.parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return handle

    def _arrived(self, gradient: Gradient) -> None:
        if not self._open:
            self._open = True
            self._layout.follow(self._hooked)
        if not self._explicit:
            self._call_at_end()
        gradient.fired += 1
        if self._layout.observing:
            if gradient.fired == 1:
                self._layout.order.append(gradient.index)
                self._timed(self._adopt, gradient)
        elif gradient.fired == gradient.expected:
            if not gradient.sparse:
                self._timed(self._stage, gradient)
                self._launch_full()
        elif gradient.staged:
            raise RuntimeError(
                f"Parameter '{gradient.name}' received a gradient {gradient.fired} times in one backward on rank "
                f"{self._group.rank}, but {gradient.expected} time(s) in the first; its bucket has left already. This "
                "happens where checkpointed segments that share parameters come and go. Use "
                "`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`."
            )

    def _timed(self, copy: Callable[[Gradient], None], gradient: Gradient) -> None:
        begun = time.perf_counter()
        copy(gradient)
        self.copy_seconds += time.perf_counter() - begun

    def _adopt(self, gradient: Gradient) -> None:
        """Move a fresh gradient to its place, where it may still grow: that frees memory, and no more."""
        view, local = gradient.view, gradient.parameter.grad
        assert local is not None
        if view is not None and local.layout == torch.strided and not local.requires_grad and not lives_in(local, view):
            gradient.parameter.grad = view.copy_(local)

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
        while self._launched < len(self._layout.buckets) and self._layout.buckets[self._launched].missing == 0:
            bucket = self._layout.buckets[self._launched]
            bucket.flags.fill_(1)
            self._launch(bucket, background=True)

    def _launch(self, bucket: LiveBucket, background: bool) -> None:
        bucket.work = self._collective.all_reduce(bucket.flat, background, exact=len(bucket.gradients))
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
        if self._open and not self._explicit and not inside_backward(sys._getframe()):
            self.finish()

    # -- after backward ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> None:
        """Send what is left, wait for all buckets, and install the means. Collective."""
        begun = time.perf_counter()
        self._layout.follow(self._hooked)
        if self._layout.observing:
            self._layout.share(self._hooked)
        for bucket in self._layout.buckets[self._launched :]:
            self._complete(bucket)
        for number, bucket in enumerate(self._layout.buckets):
            assert bucket.work is not None
            with self._waiting(bucket.label(number)):
                bucket.work.wait()
        for bucket in self._layout.buckets:
            self._install(bucket)
        for gradient in self._hooked:
            if gradient.sparse:
                with self._waiting(f"sparse gradient '{gradient.name}'"):
                    self._average_sparse(gradient)
        self._reset()
        ended = time.perf_counter()
        self.exposed_seconds += ended - begun
        if self.watch is not None:
            self.watch(begun, ended, self._layout.buckets)

    def _complete(self, bucket: LiveBucket) -> None:
        """Send a bucket, whatever this rank has of it."""
        if bucket.missing == 0:
            bucket.flags.fill_(1)
            self._launch(bucket, background=False)
            return
        used = []
        for gradient in bucket.gradients:
            grad = gradient.parameter.grad
            if gradient.sparse:  # as has only just turned out; its place stays empty
                used.append(0.0)
                continue
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
            if gradient.sparse:
                continue
            if not gradient.dirty:
                gradient.parameter.grad = gradient.view if users[place] else gradient.kept
            elif gradient.graph is not None:
                assert gradient.view is not None
                gradient.parameter.grad = with_value(gradient.graph, gradient.view)
            gradient.kept = gradient.graph = None

    def _average_sparse(self, gradient: Gradient) -> None:
        parameter = gradient.parameter
        mean = mean_of_sparse(self._group, parameter.grad, gradient.dirty, parameter.detach())
        if mean is not None:
            parameter.grad = mean

    def _reset(self) -> None:
        if not self._open and self._launched == 0:
            return
        for gradient in self._hooked:
            gradient.fired = 0
            gradient.dirty = gradient.staged = False
        for bucket in self._layout.buckets:
            bucket.missing = len(bucket.gradients)
            bucket.work = None
        self._launched = 0
        self._layout.order.clear()
        self._tasks.clear()
        self._open = False
