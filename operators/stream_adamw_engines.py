"""The passes of one optimizer step over its buckets: streamed, on the device, on the host.

A pass queues its work on lanes (:mod:`operators.staging`) and never asks the device for a value. The update of
a bucket is the same function wherever its state lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from operators.adamw_math import Hyper, adopt_weights, fused_adamw
from operators.flat_buckets import Bucket, Segment
from operators.host_adamw import HostUpdate
from operators.staging import Lanes, Mark
from operators.stream_adamw_state import FlatState

Adopt = Literal["keep", "compare", "copy"]
"""Masters: as they are; from the weights where they differ; from the weights."""


@dataclass(frozen=True)
class ParamWork:
    """What one step does to one parameter: ``grad`` and ``weight`` are flat ``[n]`` views on the device."""

    grad: Tensor
    weight: Tensor
    step: int
    group: int
    adopt: Adopt


@dataclass
class StepWork:
    """One step. ``params`` has an entry per parameter, None where there is no gradient."""

    params: list[ParamWork | None]
    hypers: list[Hyper]
    scale: Tensor | None = None
    """Factor on every gradient: one fp32 element on the device."""
    host_threads: int = 1
    """CPU threads of a host pass."""

    def of(self, segment: Segment) -> ParamWork | None:
        return self.params[segment.param]

    def live(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Buckets in which something has a gradient."""
        return [b for b in buckets if any(self.params[s.param] is not None for s in b.segments)]


@dataclass(frozen=True)
class _Views:
    """One segment's state and fp32 gradient, each ``[n]``."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor


def _views(bucket: Bucket, block_3N: Tensor, grad_N: Tensor) -> list[_Views]:
    out = []
    for segment in bucket.segments:
        span = slice(segment.offset, segment.offset + segment.size)
        out.append(_Views(block_3N[0, span], block_3N[1, span], block_3N[2, span], grad_N[span]))
    return out


@dataclass
class _Group:
    masters: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    exp_avgs: list[Tensor] = field(default_factory=list)
    exp_avg_sqs: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)


def update_bucket(bucket: Bucket, views: Sequence[_Views], work: StepWork, counts: Sequence[Tensor]) -> None:
    """Adopt, widen the gradient, scale it, AdamW, refresh the weights: one bucket, in place."""
    staged, grads, weights, masters = [], [], [], []
    groups: dict[int, _Group] = {}
    for segment, view in zip(bucket.segments, views, strict=True):
        item = work.of(segment)
        if item is None:
            continue
        weight = item.weight[segment.start : segment.stop]
        if item.adopt == "compare":
            adopt_weights(view.master, weight, view.grad)
        elif item.adopt == "copy":
            view.master.copy_(weight)
        staged.append(view.grad)
        grads.append(item.grad[segment.start : segment.stop])
        weights.append(weight)
        masters.append(view.master)
        group = groups.setdefault(item.group, _Group())
        group.masters.append(view.master)
        group.grads.append(view.grad)
        group.exp_avgs.append(view.exp_avg)
        group.exp_avg_sqs.append(view.exp_avg_sq)
        group.steps.append(counts[segment.param])
    torch._foreach_copy_(staged, grads)
    if work.scale is not None:
        torch._foreach_mul_(staged, work.scale)
    for index, group in groups.items():
        fused_adamw(
            work.hypers[index],
            masters=group.masters,
            grads=group.grads,
            exp_avgs=group.exp_avgs,
            exp_avg_sqs=group.exp_avg_sqs,
            steps=group.steps,
        )
    torch._foreach_copy_(weights, masters)


class StepCounts:
    """Steps of every parameter as one device tensor: torch's fused kernel reads them there."""

    def __init__(self, params: int, device: torch.device) -> None:
        self._counts_P = torch.zeros(params, dtype=torch.float32, device=device)
        self.each = list(self._counts_P.unbind())

    def advance(self, work: StepWork) -> None:
        """Count this step for the parameters that take part in it."""
        taking_part = [self.each[i] for i, item in enumerate(work.params) if item is not None]
        torch._foreach_add_(taking_part, 1.0)

    def set(self, steps: Sequence[int]) -> None:
        self._counts_P.copy_(torch.tensor(steps, dtype=torch.float32))


class StreamPass:
    """Buckets travel host → slot → host while the slots rotate; staging is exactly ``slots · capacity · 16`` bytes.

    Args:
        state: masters and moments on the host.
        buckets: what this pass updates.
        capacity: elements of a slot, β.
        slots: s.
    """

    def __init__(
        self,
        state: FlatState,
        buckets: Sequence[Bucket],
        *,
        capacity: int,
        slots: int,
        staging: Tensor,
        lanes: Lanes,
    ) -> None:
        self._state, self._buckets, self._lanes = state, buckets, lanes
        self._slots, self._capacity = slots, capacity
        self._staging_S4C = staging.view(slots, 4 * capacity)
        self._loaded = [lanes.mark() for _ in range(slots)]
        self._updated = [lanes.mark() for _ in range(slots)]
        self._freed = [lanes.mark() for _ in range(slots)]
        self._last_return: Mark = lanes.mark()
        self._cached: dict[tuple[int, int], tuple[Tensor, Tensor, list[_Views]]] = {}
        self.throttled = False
        """Never queue more than s buckets ahead: the copies of a host pass take their turn on the same lanes, and
        would wait behind the whole stream."""

    def run(self, work: StepWork, counts: Sequence[Tensor]) -> None:
        """Queue one step; nothing here waits, unless ``throttled``."""
        live = work.live(self._buckets)
        for k in range(min(self._slots, len(live))):
            self._fetch(k, live[k])
        for k, bucket in enumerate(live):
            slot = k % self._slots
            if self.throttled and k >= self._slots:
                self._lanes.host_wait(self._freed[slot])
            _, _, views = self._place(bucket, slot)
            self._lanes.submit(
                "compute",
                partial(update_bucket, bucket, views, work, counts),
                after=[self._loaded[slot]],
                done=self._updated[slot],
            )
            self._return(k, bucket)
            # Queued s ahead and in this order, the copies overlap even where all streams share one queue.
            if k + self._slots < len(live):
                self._fetch(k + self._slots, live[k + self._slots])
        if live:
            self._lanes.submit("out", _nothing, done=self._last_return)

    def _fetch(self, k: int, bucket: Bucket) -> None:
        slot = k % self._slots
        on_host, on_device, _ = self._place(bucket, slot)
        # Which slot a bucket takes depends on which buckets have gradients, so a bucket may still be on its way
        # home from another slot of the step before.
        self._lanes.submit(
            "in",
            partial(on_device.copy_, on_host, non_blocking=True),
            after=[self._freed[slot], self._last_return],
            done=self._loaded[slot],
        )

    def _return(self, k: int, bucket: Bucket) -> None:
        slot = k % self._slots
        on_host, on_device, _ = self._place(bucket, slot)
        self._lanes.submit(
            "out",
            partial(on_host.copy_, on_device, non_blocking=True),
            after=[self._updated[slot]],
            done=self._freed[slot],
        )

    def _place(self, bucket: Bucket, slot: int) -> tuple[Tensor, Tensor, list[_Views]]:
        key = (bucket.offset, slot)
        if key not in self._cached:
            staged = self._staging_S4C[slot]
            on_device = staged[: 3 * bucket.size].view(3, bucket.size)
            grad = staged[3 * self._capacity : 3 * self._capacity + bucket.size]
            self._cached[key] = (self._state.block(bucket), on_device, _views(bucket, on_device, grad))
        return self._cached[key]


class DevicePass:
    """State on the device: the same update with nothing to move, and one bucket's fp32 gradient as workspace."""

    def __init__(
        self, state: FlatState, buckets: Sequence[Bucket], workspace_N: Tensor, lanes: Lanes
    ) -> None:
        self._buckets, self._lanes = buckets, lanes
        self._views = {b.offset: _views(b, state.block(b), workspace_N[: b.size]) for b in buckets}

    def run(self, work: StepWork, counts: Sequence[Tensor]) -> None:
        """Queue one step on the compute lane."""
        for bucket in work.live(self._buckets):
            views = self._views[bucket.offset]
            self._lanes.submit("compute", partial(update_bucket, bucket, views, work, counts))


class HostPass:
    """Buckets stay; their gradients come down and their weights go up, slot by slot, around the host's update.

    The thread that runs it waits for gradients to arrive and queues the copies; a second one updates, and has
    its next bucket before it is done with the last. The device never waits for either.

    Args:
        staging: ``[slots, 2, 4 · capacity]`` uint8 host memory: gradients, weights, in their own dtypes.
        scale: ``[1]`` fp32 host memory, where the clip coefficient arrives.
    """

    def __init__(
        self,
        state: FlatState,
        buckets: Sequence[Bucket],
        *,
        capacity: int,
        slots: int,
        staging: Tensor,
        scale: Tensor,
        update: HostUpdate,
        lanes: Lanes,
    ) -> None:
        self._state, self._buckets, self._lanes, self._update = state, buckets, lanes, update
        self._slots = slots
        self._staging_S2C = staging.view(slots, 2, 4 * capacity)
        self._scale = scale
        self._ready: Mark = lanes.mark()
        self._arrived = [lanes.mark() for _ in range(slots)]
        self._sent = [lanes.mark() for _ in range(slots)]
        self._updater: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Mark where gradients and clip coefficient are ready. Called by the thread that owns the step."""
        self._lanes.submit("compute", _nothing, done=self._ready)

    def close(self) -> None:
        """Order the caller's stream behind the weights. Called by the thread that owns the step, after run."""
        self._lanes.submit("compute", _nothing, after=self._sent)

    @torch.no_grad()
    def run(self, work: StepWork) -> None:
        """One step on the calling thread, between :meth:`open` and :meth:`close`."""
        live = work.live(self._buckets)
        if not live:
            return
        if work.scale is not None:
            scale = work.scale
            self._lanes.submit("out", lambda: _copy(self._scale, scale.reshape(1)), after=[self._ready])
        for k in range(min(self._slots, len(live))):
            self._fetch(k, live[k], work)
        if self._updater is None:
            self._updater = ThreadPoolExecutor(1, thread_name_prefix="host-adamw-update")
        updates: list[Future[None]] = []
        finished = 0

        def finish() -> None:
            nonlocal finished
            updates[finished].result()
            self._send(finished % self._slots, live[finished], work)
            if finished + self._slots < len(live):
                self._fetch(finished + self._slots, live[finished + self._slots], work)
            finished += 1

        try:
            for k, bucket in enumerate(live):
                if k - finished == self._slots:  # one slot: its bucket is fetched when the last one is done
                    finish()
                self._lanes.host_wait(self._arrived[k % self._slots])
                updates.append(self._updater.submit(self._update_bucket, bucket, k % self._slots, work))
                if k > finished:
                    finish()
            while finished < len(updates):
                finish()
        finally:
            wait(updates)  # after an error too: nobody writes state once the step is over

    @torch.no_grad()
    def _update_bucket(self, bucket: Bucket, slot: int, work: StepWork) -> None:
        factor = 1.0 if work.scale is None else float(self._scale[0])
        for segment in bucket.segments:
            self._update_segment(segment, self._state.block(bucket), slot, work, factor)

    def _update_segment(
        self, segment: Segment, block_3N: Tensor, slot: int, work: StepWork, factor: float
    ) -> None:
        item = work.of(segment)
        if item is None:
            return
        span = slice(segment.offset, segment.offset + segment.size)
        master, exp_avg, exp_avg_sq = (block_3N[row, span] for row in range(3))
        weight = self._staged(slot, 1, segment, item.weight.dtype)
        if item.adopt == "compare":
            adopt_weights(master, weight, torch.empty_like(master))
        elif item.adopt == "copy":
            master.copy_(weight)
        self._update(
            master,
            exp_avg,
            exp_avg_sq,
            self._staged(slot, 0, segment, item.grad.dtype),
            weight,
            hyper=work.hypers[item.group],
            step=item.step,
            scale=factor,
            threads=work.host_threads,
        )

    def _fetch(self, k: int, bucket: Bucket, work: StepWork) -> None:
        slot = k % self._slots

        def down() -> None:
            for segment in bucket.segments:
                if (item := work.of(segment)) is None:
                    continue
                span = slice(segment.start, segment.stop)
                _copy(self._staged(slot, 0, segment, item.grad.dtype), item.grad[span])
                if item.adopt != "keep":
                    _copy(self._staged(slot, 1, segment, item.weight.dtype), item.weight[span])

        # `sent` too: weights on their way up from this slot must be gone before others come down or are written
        # into it, so what has arrived tells the host that the whole slot is its own.
        self._lanes.submit("out", down, after=[self._ready, self._sent[slot]], done=self._arrived[slot])

    def _send(self, slot: int, bucket: Bucket, work: StepWork) -> None:
        def up() -> None:
            for segment in bucket.segments:
                if (item := work.of(segment)) is not None:
                    weight = item.weight[segment.start : segment.stop]
                    _copy(weight, self._staged(slot, 1, segment, weight.dtype))

        self._lanes.submit("in", up, done=self._sent[slot])

    def _staged(self, slot: int, row: int, segment: Segment, dtype: torch.dtype) -> Tensor:
        start = 4 * segment.offset
        return self._staging_S2C[slot, row, start : start + segment.size * dtype.itemsize].view(dtype)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def _nothing() -> None:
    return
