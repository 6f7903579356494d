"""OffloadStreamAdamW: AdamW whose masters and moments live on the host (paper §OffloadStreamAdamW, Eq. 5).

The weights on the device stay in their own dtype. fp32 masters and both moments lie in one page-locked slab, cut
into buckets of at most β parameters. Four engines update them, with the same arithmetic:

- ``stream``: buckets rotate through s slots on the device: copied in, updated and their weights refreshed, copied
  home. Device memory is exactly ``s · β · 16`` bytes; no call in a step waits for the device.
- ``host``: gradients come down, the host's AdamW updates, weights go up, pipelined bucket by bucket.
- ``split``: the first ``host_share`` of the parameters by ``host``, the rest by ``stream``, at the same time.
- ``device``: state on the card. The baseline, and the right choice where it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from operators.adamw_math import Hyper, clip_coefficient, local_norm
from operators.bounds.stream_adamw import (
    HOST_BUCKET_PARAMS,
    SCALE_BYTES,
    STATE_BYTES,
    host_bytes,
    stream_adamw_terms,
)
from operators.errors import RuleError
from operators.flat_buckets import bucket_capacity, cut_buckets, flat_params, host_boundary
from operators.host_adamw import HostKernel, host_update
from operators.pinned_slab import PinnedSlab
from operators.ranks import Ranks
from operators.staging import Lanes, lanes_for
from operators.stream_adamw_checks import (
    Engine,
    check_arguments,
    check_group,
    check_parameters,
    checked_entry,
    checked_grad,
    fingerprint,
    flat_weight,
    local_shard,
)
from operators.stream_adamw_engines import (
    Adopt,
    DevicePass,
    HostPass,
    ParamWork,
    StepCounts,
    StepWork,
    StreamPass,
)
from operators.stream_adamw_state import STATE_NAMES, FlatState, host_memory_of

_META = "flatpeak"
OPERATOR_VERSION = 3
"""Raised by hand when the schedule or the arithmetic of an engine changes: measurements are keyed by it."""


class OffloadStreamAdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and its state on the host.

    ``stream``, ``split``'s streamed part and ``device`` give the bits of ``torch.optim.AdamW(fused=True)`` on the
    parameters' device, run on fp32 masters with fp32 gradients; ``host`` those of the same on the CPU. The two
    differ in the last bits, which is why ``engine`` and ``host_share`` stay what they are for a run.

    Args:
        params: parameters or groups, bf16 or fp32, dense, on one device. DTensors are updated shard by shard.
            Group keys: ``lr, betas, eps, weight_decay`` and ``replicas``, how many ranks of ``norm_ranks`` hold
            the same copy of the group (its share of the global norm is divided by it).
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        amsgrad: refused; a third moment is not kept.
        engine: ``stream``, ``host``, ``split`` or ``device``.
        bucket_params: β, parameters a bucket holds at most (rounded down to a multiple of 64).
        staging_slots: s, buckets under way at a time.
        host_share: share of the parameters updated on the host; for ``split`` only.
        host_bucket_params: parameters a bucket of the host pass holds at most; its staging is host memory, so it
            is coarser than the stream's. None: 25 million, or β if that is more.
        host_threads: CPU threads of the compiled host pass. None: torch's, less one where there are more than 4:
            somebody has to queue the copies.
        max_grad_norm: clip the gradients to this global 2-norm. The gradients themselves are left as they are.
        norm_ranks: the group over which the norm is taken; every rank of it calls :meth:`step` together. None:
            the norm of this rank.
        host_kernel: ``native`` (compiled on first use), ``plain`` (torch), ``auto`` (the first that works).
        host_memory: lent host memory of :attr:`host_bytes` bytes, uint8; overwritten. None: a slab of its own.
        make_lanes: where work is queued, from the device; for tests and benchmarks that delay a lane.

    Raises:
        RuleError: an argument breaks one of these rules, or host memory cannot be had.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        engine: Engine = "stream",
        bucket_params: int = 5_000_000,
        staging_slots: int = 3,
        host_share: float = 0.0,
        host_bucket_params: int | None = None,
        host_threads: int | None = None,
        max_grad_norm: float | None = None,
        norm_ranks: Ranks | None = None,
        host_kernel: HostKernel = "auto",
        host_memory: Tensor | None = None,
        make_lanes: Callable[[torch.device], Lanes] = lanes_for,
    ) -> None:
        self._sealed = False
        check_arguments(engine, staging_slots, host_share, max_grad_norm, host_threads)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "replicas": 1,
        }
        super().__init__(params, defaults)
        self.engine, self.host_share = engine, host_share
        self.max_grad_norm, self._norm_ranks = max_grad_norm, norm_ranks
        self.last_grad_norm: Tensor | None = None
        """Global norm before clipping at the last step: one fp32 element on the device. None without clipping."""

        self._group_of = [g for g, group in enumerate(self.param_groups) for _ in group["params"]]
        self._params: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            check_group(group)
        self._device = check_parameters(self._params)
        sizes = [local_shard(p).numel() for p in self._params]
        self.flat_params = flat_params(sizes)
        self.bucket_params = bucket_capacity(bucket_params, self.flat_params)
        if host_bucket_params is None:
            host_bucket_params = max(self.bucket_params, HOST_BUCKET_PARAMS)
        self.host_bucket_params = bucket_capacity(host_bucket_params, self.flat_params, "host_bucket_params")
        self.staging_slots, self.host_threads = staging_slots, host_threads
        share = {"host": 1.0, "split": host_share}.get(engine, 0.0)
        boundary = host_boundary(self.flat_params, share)
        host_buckets = cut_buckets(sizes, 0, boundary, self.host_bucket_params)
        card_buckets = cut_buckets(sizes, boundary, self.flat_params, self.bucket_params)

        on_device = engine == "device"
        state_bytes = STATE_BYTES * self.flat_params
        self.host_bytes = host_bytes(
            params=self.flat_params,
            bucket_params=self.bucket_params,
            staging_slots=staging_slots,
            engine=engine,
            host_share=share,
            host_bucket_params=self.host_bucket_params,
        )
        """Host bytes of state and host staging; a slab locks them rounded up to the page."""

        self._slab: PinnedSlab | None = None
        if on_device:
            memory = torch.empty(state_bytes, dtype=torch.uint8, device=self._device)
        elif host_memory is not None:
            memory = host_memory_of(host_memory, self.host_bytes)
        else:
            self._slab = PinnedSlab(self.host_bytes, pin=None if self._device.type == "cuda" else False)
            memory = self._slab.buffer
        self._state = FlatState(memory, self.flat_params, (*host_buckets, *card_buckets), len(self._params))
        self._counts = StepCounts(len(self._params), self._device)
        staged = stream_adamw_terms(
            params=self.flat_params,
            bucket_params=self.bucket_params,
            staging_slots=staging_slots,
            engine=engine,
            host_share=share,
        )["optimizer_staging"]
        self._staging = torch.empty(staged // 4, dtype=torch.float32, device=self._device)
        self._lanes = make_lanes(self._device)

        self._device_pass: DevicePass | None = None
        self._stream: StreamPass | None = None
        if on_device:
            self._device_pass = DevicePass(self._state, card_buckets, self._staging, self._lanes)
        elif card_buckets:
            self._stream = StreamPass(
                self._state,
                card_buckets,
                capacity=self.bucket_params,
                slots=staging_slots,
                staging=self._staging,
                lanes=self._lanes,
            )
        self._host: HostPass | None = None
        if host_buckets:
            staging_end = self.host_bytes - SCALE_BYTES
            self._host = HostPass(
                self._state,
                host_buckets,
                capacity=self.host_bucket_params,
                slots=staging_slots,
                staging=memory[state_bytes:staging_end],
                scale=memory[staging_end : staging_end + 4].view(torch.float32),
                update=host_update(host_kernel),
                lanes=self._lanes,
            )
        if self._stream is not None:
            self._stream.throttled = self._host is not None
        self._worker: ThreadPoolExecutor | None = None
        self._steps = [0] * len(self._params)
        self._seen: list[tuple[int, ...] | None] = [None] * len(self._params)
        self._has_master = [False] * len(self._params)
        self._torn: str | None = None
        self._sealed = True

    @property
    def staging_bytes(self) -> int:
        """Device bytes this optimizer holds for staging: ``s · β · 16`` when it streams."""
        return self._staging.nbytes

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; afterwards the buckets are laid out.

        Raises:
            RuleError: the optimizer is built already.
        """
        if self._sealed:
            raise RuleError(
                rule="parameter groups are given when the optimizer is built: its buckets are laid out then",
                value=list(param_group),
                remedy="Build a new OffloadStreamAdamW with all groups and load this one's state_dict.",
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One AdamW step of every parameter that has a gradient.

        Weights written by others since the last step (a loaded checkpoint) are seen by their version counter or
        address and become the masters where they differ from them. Writing through ``.data`` changes neither:
        call :meth:`adopt_weights` after it.

        Returns:
            What ``closure`` returned, None without one.

        Raises:
            RuleError: a gradient does not fit its parameter, or a group's values are out of range; nothing was
                changed then.
            RuntimeError: an earlier step failed half-way; load a state_dict.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_whole()
        work = self._collect()
        if self.max_grad_norm is not None:
            work.scale = self._clip(work, self.max_grad_norm)
        if not any(work.params):
            return loss
        self._torn = "a step failed half-way: some parameters were updated, others were not"
        self._run(work)
        known = sum(self._has_master)
        for index, item in enumerate(work.params):
            if item is not None:
                self._steps[index] = item.step
                self._has_master[index] = True
                self._seen[index] = fingerprint(self._params[index])
        if sum(self._has_master) != known:
            self._name_states()
        self._torn = None
        return loss

    def adopt_weights(self) -> None:
        """Let the next step rebuild the masters from the weights, wherever they differ."""
        self._seen = [None] * len(self._params)

    def _run(self, work: StepWork) -> None:
        self._lanes.submit("compute", lambda: self._counts.advance(work))
        counts = self._counts.each
        if self._host is None:
            for card in (self._stream, self._device_pass):
                if card is not None:
                    card.run(work, counts)
            return
        work.host_threads = self.host_threads or _threads_for_host()
        self._host.open()
        if self._stream is None:
            self._host.run(work)
        else:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="host-adamw")
            on_host = self._worker.submit(self._host.run, work)
            try:
                self._stream.run(work, counts)
            finally:
                on_host.result()
        self._host.close()

    def _collect(self) -> StepWork:
        work = StepWork([], [Hyper.of(group) for group in self.param_groups])
        for group in self.param_groups:
            check_group(group)
        for index, param in enumerate(self._params):
            if param.grad is None:
                work.params.append(None)
                continue
            weight, grad = local_shard(param).detach(), checked_grad(param, index)
            adopt: Adopt = "keep"
            if not self._has_master[index]:
                adopt = "copy"
            elif self._seen[index] != fingerprint(param):
                adopt = "compare"
            work.params.append(
                ParamWork(
                    grad=grad.reshape(-1),
                    weight=flat_weight(weight, index),
                    step=self._steps[index] + 1,
                    group=self._group_of[index],
                    adopt=adopt,
                )
            )
        return work

    def _clip(self, work: StepWork, max_norm: float) -> Tensor:
        """The factor on all gradients, on the device. A collective of ``norm_ranks``, also without gradients."""
        by_replicas: dict[int, list[Tensor]] = {}
        for item in work.params:
            if item is not None and item.grad.numel():
                by_replicas.setdefault(self.param_groups[item.group]["replicas"], []).append(item.grad)
        if self._norm_ranks is None and set(by_replicas) == {1}:
            total = local_norm(by_replicas[1])
        else:
            square = torch.zeros((), dtype=torch.float32, device=self._device)
            for replicas, grads in by_replicas.items():
                square += local_norm(grads).square() / replicas
            if self._norm_ranks is not None:
                self._norm_ranks.all_reduce(square)
            total = square.sqrt()
        self.last_grad_norm = total
        return clip_coefficient(total, max_norm)

    def _check_whole(self) -> None:
        if self._torn is not None:
            raise RuntimeError(f"{self._torn}. Load a state_dict and its weights before going on.")

    def drain(self) -> None:
        """Wait until host state is whole. Saving does it; a step never needs it."""
        self._lanes.drain()

    def state_dict(self) -> dict[str, Any]:
        """State by parameter, gathered on the CPU: ``step``, ``exp_avg``, ``exp_avg_sq``, ``master`` (fp32).

        It does not depend on the engine's buckets: any engine, β and s load it, and ``torch.load(weights_only=
        True)`` reads it. The state of a DTensor is a DTensor of the same placements, its shard on the CPU.

        Raises:
            RuntimeError: a step failed half-way.
        """
        self._check_whole()
        self.drain()
        self.state.clear()
        for index, param in enumerate(self._params):
            if not self._has_master[index]:
                continue
            entry = {"step": torch.tensor(float(self._steps[index]))}
            for name in STATE_NAMES:
                entry[name] = torch.empty_like(param, dtype=torch.float32, device="cpu", requires_grad=False)
                self._state.gather(index, name, local_shard(entry[name]))
            self.state[param] = entry
        try:
            packed = super().state_dict()
        finally:
            self._name_states()
        packed[_META] = {"engine": self.engine, "host_share": self.host_share}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary of :meth:`state_dict`, or of ``torch.optim.AdamW``, into this layout.

        Weights and optimizer may be loaded in either order. Where the weights are not the rounded masters, the
        weights win. A state without ``master`` (torch's) takes its masters from the weights. Hooks see what they
        see with torch's optimizers: before, the dictionary as given; after, the whole state loaded.

        Warns:
            UserWarning: the state comes from another engine or share: going on is right, but not bit for bit.

        Raises:
            RuleError: a state does not fit its parameter; nothing was changed then.
            ValueError: the parameter groups do not match.
        """
        self.drain()
        flat: list[tuple[int, dict[str, Tensor]] | None] = []
        source: list[Any] = []

        def take(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            ids = [i for group in given["param_groups"] for i in group["params"]]
            entries: Mapping[Any, Mapping[str, Any]] = given["state"]
            flat.extend(
                checked_entry(entries.get(i), local_shard(p), n)
                for n, (i, p) in enumerate(zip(ids, self._params, strict=False))
            )
            for group in given["param_groups"]:
                check_group(group)
            source.append(given.get(_META))
            return {**given, "state": {}}

        def put(_: torch.optim.Optimizer) -> None:
            for index, entry in enumerate(flat):
                self._state.clear(index)
                self._steps[index] = 0 if entry is None else entry[0]
                self._has_master[index] = entry is not None and "master" in entry[1]
                for name, value in ({} if entry is None else entry[1]).items():
                    self._state.scatter(index, name, value)
            for group in self.param_groups:
                group.setdefault("replicas", 1)
            self._counts.set(self._steps)
            self.adopt_weights()
            self._name_states()
            self._torn = None

        # Behind the user's hooks, and before them.
        hooks = [
            self.register_load_state_dict_pre_hook(take),
            self.register_load_state_dict_post_hook(put, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        self._warn_of_other_engine(source[0])

    def _name_states(self) -> None:
        """What ``state`` holds between calls: which parameters have state, and its names; the values are on the host.

        Tools that look there (torch.distributed.checkpoint) see that nothing has to be made, and what to ask for.
        """
        self.state.clear()
        for param, has in zip(self._params, self._has_master, strict=True):
            if has:
                self.state[param] = dict.fromkeys(("step", *STATE_NAMES))

    def _warn_of_other_engine(self, saved: Any) -> None:
        mine = (self.engine, self.host_share)
        if saved is not None and (saved["engine"], saved["host_share"]) != mine:
            warn(
                f"optimizer state of engine {saved['engine']!r} with host_share {saved['host_share']} goes on as "
                f"{self.engine!r} with {self.host_share}: host and device round differently in the last bit",
                UserWarning,
                stacklevel=3,
            )


def _threads_for_host() -> int:
    threads = torch.get_num_threads()
    return threads - (threads > 4)
