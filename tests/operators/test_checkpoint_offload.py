"""SCO: the same bits, at most two restored boundaries, the budget to the page."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from operators.checkpoint_offload import OffloadSession
from operators.checkpoint_offload_slots import BoundarySlab
from operators.errors import RuleError
from operators.pinned_slab import PAGE_BYTES, PinnedSlab, page_rounded

_N, _H = 40, 48
_BOUNDARY = _N * _H * 4
_ONE = page_rounded(_BOUNDARY)


class Block(nn.Module):
    """A residual block that notes the storages of the inputs it is recomputed with."""

    def __init__(self, live: list[StorageWeakRef] | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(_H, 2 * _H)
        self.down = nn.Linear(2 * _H, _H)
        self.live = live
        self.most = 0

    def forward(self, x_NH: Tensor) -> Tensor:
        if self.live is not None and torch._C._current_graph_task_id() != -1:
            self.live.append(StorageWeakRef(x_NH.untyped_storage()))
            self.most = sum(not storage.expired() for storage in self.live)
        y_NH: Tensor = self.down(torch.tanh(self.up(x_NH)))
        return x_NH + y_NH


class Stack(nn.Module):
    """Checkpointed blocks; ``views`` cuts every boundary out of a larger base that is then let go."""

    def __init__(self, blocks: int, *, reentrant: bool, views: bool = False, count: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(_H, _H)
        live: list[StorageWeakRef] | None = [] if count else None
        self.blocks = nn.ModuleList([Block(live) for _ in range(blocks)])
        self.reentrant, self.views = reentrant, views

    def forward(self, x_NH: Tensor) -> Tensor:
        x_NH = self.embed(x_NH)
        for block in self.blocks:
            if self.views:
                x_NH = torch.cat([x_NH.new_zeros(3, _H), x_NH, x_NH.new_zeros(2, _H)])[3:-2]
            x_NH = checkpoint(block, x_NH, use_reentrant=self.reentrant)
        return x_NH.square().mean()


def _grads(stack: nn.Module, loss: Tensor, times: int = 1) -> list[Tensor]:
    stack.zero_grad()
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return [p.grad.clone() for p in stack.parameters() if p.grad is not None]


def _tokens(seed: int = 0) -> Tensor:
    return torch.randn(_N, _H, generator=torch.Generator().manual_seed(seed))


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def _no_gc() -> Iterator[None]:
    """Everything must be freed by reference counting: a collector that runs later is a peak now."""
    gc.disable()
    yield
    gc.enable()


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.integers(1, 6),
    budget_boundaries=st.integers(0, 7),
    slack=st.integers(0, PAGE_BYTES - 1),
    reentrant=st.booleans(),
    views=st.booleans(),
    backwards=st.integers(1, 2),
    told=st.booleans(),
    inside=st.booleans(),
)
def test_gradients_are_the_same_bits(
    blocks: int,
    budget_boundaries: int,
    slack: int,
    reentrant: bool,
    views: bool,
    backwards: int,
    told: bool,
    inside: bool,
) -> None:
    torch.manual_seed(1)
    stack = Stack(blocks, reentrant=reentrant, views=views, count=True)
    want = _grads(stack, stack(_tokens()), backwards)
    budget = budget_boundaries * _ONE + slack
    session = OffloadSession(
        budget,
        boundary_bytes=_BOUNDARY if told else None,
        boundaries=blocks if told else None,
        min_bytes=1,
        device="cpu",
    )
    most = min(budget_boundaries, blocks - 1)
    for _ in range(2):
        with session:
            loss = stack(_tokens())
            held = session.report().used_bytes
            if inside:
                got = _grads(stack, loss, backwards)
        if not inside:
            got = _grads(stack, loss, backwards)
        assert _same(want, got)
        del loss
        report = session.report()
        assert report.boundaries == blocks
        assert report.offloaded == most
        assert held <= report.locked_bytes <= budget
        assert report.used_bytes == 0
        assert report.most_restored <= 2
    if told:
        assert report.locked_bytes == most * _ONE
    session.close()


@pytest.mark.parametrize("reentrant", [False, True])
def test_at_most_two_restored_boundaries_live(reentrant: bool) -> None:
    stack = Stack(8, reentrant=reentrant, count=True)
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        loss = stack(_tokens())
    _grads(stack, loss)
    # counted by the blocks, through the storages they were given, the one being given included
    assert max(block.most for block in stack.blocks if isinstance(block, Block)) == 1
    assert session.report().most_restored == 2  # that one and the one on its way
    assert session.report().reloads == 7
    assert session.report().prefetched == 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_device_storage_is_freed_after_the_copy(reentrant: bool) -> None:
    seen: list[StorageWeakRef] = []

    class Watch(Block):
        def forward(self, x_NH: Tensor) -> Tensor:
            seen.append(StorageWeakRef(x_NH.untyped_storage()))
            return super().forward(x_NH)

    stack = Stack(0, reentrant=reentrant)
    stack.blocks.extend(Watch() for _ in range(5))
    with OffloadSession(3 * _ONE, min_bytes=1, device="cpu"):
        loss = stack(_tokens())
    # the first three are on the host; the fourth did not fit; the last stays
    assert [storage.expired() for storage in seen] == [True, True, True, False, False]
    loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_views_with_an_offset_survive_their_base(reentrant: bool) -> None:
    torch.manual_seed(2)
    weights = [nn.Parameter(torch.randn(_H, _H) / 7) for _ in range(4)]

    def run() -> list[Tensor]:
        x_NH = _tokens() * 1.0
        x_NH.requires_grad_()
        for weight in weights:
            base = torch.cat([torch.full((5, _H), torch.nan), x_NH, torch.full((1, _H), torch.nan)]).flatten()
            x_NH = base[5 * _H : -_H].view(_N, _H)
            del base
            x_NH = checkpoint(lambda x, w: torch.tanh(x @ w), x_NH, weight, use_reentrant=reentrant)
            for _ in range(3):
                torch.full(((_N + 6) * _H,), torch.nan)
        loss = x_NH.square().sum()
        junk = [torch.full(((_N + 6) * _H,), torch.nan) for _ in range(8)]
        grads = list(torch.autograd.grad(loss, weights)) if not reentrant else _grad_of(loss, weights)
        assert len(junk) == 8
        return grads

    want = run()
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        got = run()
    assert session.report().offloaded == 3
    assert _same(want, got)
    assert all(bool(g.isfinite().all()) for g in got)


def _grad_of(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    for weight in weights:
        weight.grad = None
    loss.backward()
    return [weight.grad.clone() for weight in weights if weight.grad is not None]


def test_layout_and_alignment_come_back_as_they_were() -> None:
    found: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []

    def block(x: Tensor) -> Tensor:
        found.append((tuple(x.shape), x.stride(), x.data_ptr() % 64))
        return x.sin()

    base = torch.randn(3 + _N * _H).requires_grad_() * 1
    boundary = base[3:].view(_H, _N).t()
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        y = checkpoint(block, boundary, use_reentrant=False)
        y = checkpoint(block, y.clone(), use_reentrant=False)
    del base, boundary
    y.sum().backward()
    assert session.report().reloads == 1
    assert found[0] == ((_N, _H), (1, _N), 12)
    assert found[0] == found[-1]  # the first block is the last to recompute


def test_the_same_tensor_saved_twice_goes_once() -> None:
    weight = nn.Parameter(torch.randn(_H, _H) / 7)

    def run() -> Tensor:
        x = weight @ torch.ones(_H, _H)
        a = checkpoint(torch.sin, x, use_reentrant=False)
        b = checkpoint(torch.cos, x, use_reentrant=False)
        c = checkpoint(lambda u, v, w: u * v + w, a, b, x, use_reentrant=False)
        d: Tensor = checkpoint(torch.tanh, c, use_reentrant=False)
        return d.sum()

    want = _grad_of(run(), [weight])
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        loss = run()
        used = session.report().used_bytes
    assert _same(want, _grad_of(loss, [weight]))
    assert session.report().boundaries == 4  # x, a, b, c: x once
    assert used == 4 * page_rounded(_H * _H * 4)  # c was on its way when it turned out to be the last


def test_only_block_inputs_go() -> None:
    mask = torch.ones(_N, _H)
    weight = nn.Parameter(torch.randn(_H, _H))
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        x = (_tokens() @ weight).exp()  # plain autograd saves
        y = checkpoint(lambda x, m, w: (x * m) @ w, x, mask, weight, use_reentrant=False)
        z = checkpoint(torch.sin, y[:, ::2], use_reentrant=False)  # holes: stays, as it is
        checkpoint(torch.sin, z, use_reentrant=False).sum().backward()
    assert session.report().boundaries == 2  # x and z
    picked: list[tuple[int, ...]] = []

    def select(x: Tensor) -> bool:
        picked.append(tuple(x.shape))
        return False

    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu", select=select) as none:
        checkpoint(torch.sin, torch.sin(weight), use_reentrant=False).sum().backward()
    assert picked == [(_H, _H)]
    assert none.report().boundaries == 0


def test_a_function_may_declare_that_it_saves_a_boundary() -> None:
    class Segment(torch.autograd.Function):
        saves_boundary = True

        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            grad_x: Tensor = grads[0] * x.cos()
            return grad_x

    weight = nn.Parameter(torch.randn(_H, _H))

    def run() -> Tensor:
        x: Tensor = weight * 2
        for _ in range(3):
            x = Segment.apply(x)  # type: ignore[no-untyped-call]
        loss: Tensor = x.sum()
        return loss

    want = _grad_of(run(), [weight])
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        loss = run()
    assert _same(want, _grad_of(loss, [weight]))
    assert session.report().offloaded == 2


def test_inputs_kept_by_a_noop_function_are_boundaries_too() -> None:
    # how torch before 2.13 keeps the inputs of a non-reentrant checkpoint
    class NoopSaveInputs(torch.autograd.Function):
        @staticmethod
        def forward(*args: object) -> Tensor:
            return torch.empty((0,))

        @staticmethod
        def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: object, output: object) -> None:
            assert isinstance(inputs, tuple)
            ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])

    NoopSaveInputs.__module__ = "torch.utils.checkpoint"
    dummy = torch.empty((0,), requires_grad=True)
    inputs = [torch.randn(_N, _H, requires_grad=True) * 1 for _ in range(3)]
    copies = [x.detach().clone() for x in inputs]
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        kept = [NoopSaveInputs.apply(dummy, {}, x, 3) for x in inputs]  # type: ignore[no-untyped-call]
    inputs.clear()
    assert session.report().boundaries == 3
    assert session.report().offloaded == 2
    for saver, copy in zip(kept, copies, strict=True):
        assert torch.equal(saver.grad_fn.saved_tensors[1], copy)


def test_a_dry_run_frees_and_restores_as_a_real_one() -> None:
    inputs: list[StorageWeakRef] = []

    class Watch(Block):
        def forward(self, x_NH: Tensor) -> Tensor:
            inputs.append(StorageWeakRef(x_NH.untyped_storage()))
            return super().forward(x_NH)

    with FakeTensorMode():
        stack = Stack(0, reentrant=False)
        stack.blocks.extend(Watch() for _ in range(5))
        with OffloadSession(2 * _ONE, min_bytes=1, device="cpu") as session:
            loss = stack(torch.randn(_N, _H))
        assert [storage.expired() for storage in inputs] == [True, True, False, False, False]
        loss.backward()
    del loss
    report = session.report()
    assert (report.boundaries, report.offloaded, report.reloads) == (5, 2, 2)
    assert report.used_bytes == 0


def test_micro_batches_forward_together_then_backward() -> None:
    stack = Stack(4, reentrant=False)
    want = [_grads(stack, stack(_tokens(i))) for i in range(3)]
    session = OffloadSession(100 * _ONE, min_bytes=1, boundaries=4, device="cpu")
    for order in ([0, 1, 2], [2, 0, 1]):
        losses = []
        for i in range(3):
            with session:
                losses.append(stack(_tokens(i)))
        assert session.report().used_bytes == 9 * _ONE
        for i in order:
            assert _same(want[i], _grads(stack, losses[i]))
        losses.clear()
        assert session.report().used_bytes == 0
    # also when they share one entry: the told number of boundaries parts them
    with session:
        losses = [stack(_tokens(i)) for i in range(3)]
    assert session.report().used_bytes == 9 * _ONE
    assert all(_same(want[i], _grads(stack, losses[i])) for i in (0, 1, 2))
    assert session.report().most_restored <= 3  # two of one stack; a third only where stacks interleave


def test_eval_and_dropped_graphs_leave_nothing() -> None:
    stack = Stack(4, reentrant=False)
    session = OffloadSession(100 * _ONE, min_bytes=1, device="cpu")
    with session, torch.no_grad():
        stack(_tokens())
    assert session.report().boundaries == 0
    with session:
        loss = stack(_tokens())
        with torch.no_grad():
            stack(_tokens(1))  # an evaluation in the middle
    assert session.report().used_bytes == 3 * _ONE
    del loss
    assert session.report().used_bytes == 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_gives_everything_back(reentrant: bool, where: str) -> None:
    class Ill(Block):
        ill = True

        def forward(self, x_NH: Tensor) -> Tensor:
            in_backward = torch._C._current_graph_task_id() != -1
            if self.ill and in_backward == (where == "backward"):
                raise KeyError("ill")
            return super().forward(x_NH)

    torch.manual_seed(3)
    stack = Stack(6, reentrant=reentrant)
    stack.blocks[3] = Ill()
    session = OffloadSession(100 * _ONE, min_bytes=1, device="cpu")
    for _ in range(2):
        with contextlib.suppress(KeyError):
            with session:
                loss = stack(_tokens())
            loss.backward()
            pytest.fail("the block is ill")
        loss = None
        gc.collect()  # the traceback of the exception may form a cycle
        assert session.report().used_bytes == 0
    Ill.ill = False
    want = _grads(stack, stack(_tokens()))
    with session:
        loss = stack(_tokens())
    assert _same(want, _grads(stack, loss))
    assert session.report().used_bytes == 0


def test_a_nested_checkpoint_is_recomputed_inside_its_block() -> None:
    inner = [nn.Linear(_H, _H) for _ in range(3)]

    def block(x: Tensor) -> Tensor:
        for layer in inner:
            x = checkpoint(layer, x.sin(), use_reentrant=False)
        return x

    def run() -> Tensor:
        x: Tensor = inner[0](_tokens())
        for _ in range(3):
            x = checkpoint(block, x, use_reentrant=True)
        return x.sum()

    weights = [layer.weight for layer in inner]
    want = _grad_of(run(), weights)
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        got = _grad_of(run(), weights)
    assert _same(want, got)
    assert session.report().boundaries == 3


def test_several_inputs_of_one_block_travel_together() -> None:
    layer = nn.Linear(_H, _H)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(layer(x)), residual + x

    def run() -> Tensor:
        x: Tensor = layer(_tokens())
        residual: Tensor = layer(_tokens(1))
        for _ in range(5):
            x, residual = checkpoint(block, x, residual, use_reentrant=False)
        return (x + residual).sum()

    want = _grad_of(run(), [layer.weight])
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        loss = run()
    assert _same(want, _grad_of(loss, [layer.weight]))
    report = session.report()
    # both inputs of the last block stay
    assert (report.blocks, report.boundaries, report.offloaded) == (5, 10, 8)
    assert report.most_restored == 2
    assert report.prefetched == report.reloads == 8


def test_small_inputs_stay_where_the_size_of_a_boundary_is_known() -> None:
    layer = nn.Linear(_H, _H)

    def block(x: Tensor, weights: Tensor) -> Tensor:
        return torch.tanh(layer(x)) * weights

    def run() -> Tensor:
        x: Tensor = layer(_tokens())
        for _ in range(4):
            x = checkpoint(block, x, x.mean(dim=1, keepdim=True), use_reentrant=False)
        return x.sum()

    want = _grad_of(run(), [layer.weight])
    with OffloadSession(2 * _ONE, boundary_bytes=_BOUNDARY, boundaries=4, device="cpu") as session:
        loss = run()
    assert _same(want, _grad_of(loss, [layer.weight]))
    report = session.report()
    assert (report.blocks, report.boundaries, report.offloaded) == (4, 4, 2)


@pytest.mark.parametrize("budget", [0, 100 * _ONE])
def test_a_boundary_written_in_place_is_refused(budget: int) -> None:
    weight = nn.Parameter(torch.randn(_H, _H))
    with OffloadSession(budget, min_bytes=1, device="cpu"):
        x = weight * 2
        y = checkpoint(torch.sin, x, use_reentrant=False)
        x.add_(1)
        z = checkpoint(torch.sin, y, use_reentrant=False)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()


def test_no_host_allocation_after_the_session_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(5, reentrant=False)
    session = OffloadSession(2 * _ONE, min_bytes=1, device="cpu")
    built: list[int] = []
    init = PinnedSlab.__init__
    pin = torch.Tensor.pin_memory

    def counted(self: PinnedSlab, nbytes: int, **kwargs: bool | None) -> None:
        built.append(nbytes)
        init(self, nbytes, **kwargs)

    def pinned(self: Tensor) -> Tensor:
        built.append(self.numel())
        return pin(self)

    monkeypatch.setattr(PinnedSlab, "__init__", counted)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    for _ in range(3):
        with session:
            loss = stack(_tokens())
        _grads(stack, loss)
    assert built == []
    assert session.report().offloaded == 2


def test_sessions_share_a_slab_and_rebalance() -> None:
    large, small = Stack(7, reentrant=False), Stack(3, reentrant=False)
    want = [_grads(stack, stack(_tokens())) for stack in (large, small)]
    with BoundarySlab(8 * _ONE) as slab:
        sessions = [OffloadSession(4 * _ONE, slab=slab, min_bytes=1) for _ in range(2)]
        with pytest.raises(RuleError, match="share"):
            OffloadSession(1 * PAGE_BYTES, slab=slab)

        def step(expect: list[int]) -> None:
            losses = []
            for session, stack in zip(sessions, (large, small), strict=True):
                with session:
                    losses.append(stack(_tokens()))
            with pytest.raises(RuleError, match="between steps"):
                slab.rebalance()
            for i, (stack, loss) in enumerate(zip((large, small), losses, strict=True)):
                assert _same(want[i], _grads(stack, loss))
            assert [s.report().offloaded for s in sessions] == expect

        step([4, 2])
        losses = []
        for session, stack in zip(sessions, (large, small), strict=True):
            with session:
                losses.append(stack(_tokens()))
        for loss in losses:
            loss.backward()
        del loss
        losses.clear()
        slab.rebalance()  # nobody has asked a session since its graph went
        step([6, 2])
        for session in sessions:
            session.close()
        assert slab.unassigned_bytes == slab.locked_bytes == 8 * _ONE


def test_a_slab_too_small_for_all_is_shared_in_proportion() -> None:
    with BoundarySlab(6 * _ONE) as slab:
        one, two = OffloadSession(0, slab=slab), OffloadSession(0, slab=slab)
        slab.wish(one, 8 * _ONE)
        slab.wish(two, 4 * _ONE)
        shares = slab.rebalance()
        assert (shares[one], shares[two]) == (4 * _ONE, 2 * _ONE)


def test_closing_leaves_living_graphs_able_to_run_backward() -> None:
    stack = Stack(4, reentrant=False)
    want = _grads(stack, stack(_tokens()))
    with OffloadSession(100 * _ONE, min_bytes=1, device="cpu") as session:
        loss = stack(_tokens())
    session.close()
    session.close()
    assert _same(want, _grads(stack, loss))
    with pytest.raises(RuleError, match="closed session"):
        session.__enter__()


def test_the_session_dies_with_its_last_user() -> None:
    session = OffloadSession(4 * _ONE, min_bytes=1, device="cpu")
    stack = Stack(3, reentrant=False)
    with session:
        loss = stack(_tokens())
    loss.backward()
    del loss
    watch = weakref.ref(session)
    del session
    gc.collect()
    assert watch() is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OffloadSession(-1, device="cpu"), "at least 0 bytes"),
        (lambda: OffloadSession(-1, boundary_bytes=8, boundaries=3, device="cpu"), "at least 0 bytes"),
        (lambda: OffloadSession(9, boundary_bytes=-8, boundaries=3, device="cpu"), "at least 0 bytes"),
        (lambda: OffloadSession(9, boundary_bytes=8, boundaries=-3, device="cpu"), "at least 0 bytes"),
        (lambda: OffloadSession(2**50, device="cpu"), "host memory"),
        (lambda: OffloadSession(0, slab=BoundarySlab(0), device="cpu"), "brings its own"),
    ],
)
def test_wrong_budgets_are_refused(make: Callable[[], OffloadSession], match: str) -> None:
    with pytest.raises(RuleError, match=match):
        make()
