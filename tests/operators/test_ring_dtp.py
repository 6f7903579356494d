"""Ring-DTP equals a dense head in float64, whatever travels, however tokens and vocabulary lie."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from operators.errors import RuleError
from operators.ranks import LoopbackRanks, Ranks
from operators.ring_dtp import Reduction, RingMode, ring_dtp
from tests.gang import gang
from tests.operators.ring_dtp_cases import Case, dense, run, worst_errors

_EXACT = 1e-12
_MODES: tuple[RingMode, ...] = ("activations", "weights", "gather")
_RINGS: tuple[RingMode, ...] = ("activations", "weights")
_REDUCTIONS: tuple[Reduction, ...] = ("none", "mean", "sum")


def _check(size: int, cases: list[Case]) -> None:
    for rank, errors in enumerate(gang(size).run(worst_errors, cases)):
        for case, error in zip(cases, errors, strict=True):
            assert error < _EXACT, (rank, case, error)


def _tokens(size: int) -> tuple[int, ...]:
    return (5, 0, 7, 3)[:size] if size > 1 else (5,)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_mode_tile_and_reduction_equals_the_dense_head(size: int) -> None:
    cases = [
        Case(_tokens(size), 13, mode=mode, strip_rows=rows, reduction=reduction, bias=bias)
        for mode, rows, reduction, bias in product(_MODES, (1, 3, None), _REDUCTIONS, (False, True))
    ]
    _check(size, cases)


def test_the_gradients_hop_may_overlap() -> None:
    cases = [
        Case(tokens, 13, mode=mode, strip_rows=2, gradient_hop="overlapped", bias=True)
        for mode, tokens in product(_RINGS, ((5, 0, 7, 3), (0, 0, 0, 4), (2, 2, 2, 2)))
    ]
    _check(4, cases)
    _check(2, [Case((3, 4), 9, mode=m, gradient_hop="overlapped") for m in _RINGS])


def test_targets_all_on_one_shard_of_an_uneven_vocabulary() -> None:
    # shards of 10, 10, 10 and 7 rows: no padding column may count, and dX must be whole at home
    cases = [
        Case((4, 4, 4, 4), 37, mode=mode, target_range=span, ignored=0.0)
        for mode, span in product(_MODES, ((0, 10), (10, 20), (30, 37)))
    ]
    assert cases[0].shards.rows == (10, 10, 10, 7)
    _check(4, cases)


def test_per_token_weights_with_zeros_and_no_reduction() -> None:
    _check(2, [Case((4, 4), 15, mode=m, reduction="none", bias=True, strip_rows=3) for m in _MODES])


def test_fewer_vocabulary_rows_than_ranks_and_hand_made_shards() -> None:
    cases = [Case((3, 2, 1, 4), 2, mode=m, bias=True) for m in _MODES]
    cases += [Case((3, 2, 1, 4), 9, mode=m, shard_rows=(0, 4, 0, 5)) for m in _MODES]
    _check(4, cases)


def test_one_rank_with_nothing_but_ignored_targets_harms_no_other() -> None:
    _check(4, [Case((3, 4, 2, 3), 11, mode=m, ignored_ranks=(1,)) for m in _MODES])


def test_no_tokens_or_no_counted_target_anywhere_gives_zero_everywhere() -> None:
    everyone = (0, 1, 2, 3)
    cases = [Case((3, 4, 2, 3), 11, mode=m, ignored_ranks=everyone, bias=True) for m in _MODES]
    cases += [Case((0, 0, 0, 0), 11, mode=m) for m in _MODES]
    _check(4, cases)
    assert float(dense(cases[0])[0][0]) == 0


def test_a_negative_ignore_index_indexes_no_column() -> None:
    cases = [
        Case((6, 6), vocab, mode=mode, ignored=0.4, ignore_index=index)
        for mode, vocab, index in product(_MODES, (128, 64), (-100, -1, 5))
    ]
    _check(2, cases)


def test_mean_divides_by_an_explicit_count() -> None:
    _check(2, [Case((3, 4), 9, mode=m, token_count=100) for m in _MODES])


def test_upstream_gradients_may_differ_between_ranks() -> None:
    # gather made its gradients in forward: it must notice, and replay
    _check(2, [Case((3, 4), 9, mode=m, upstream=(2.0, -0.5), bias=True) for m in _MODES])
    _check(2, [Case((3, 4), 9, mode=m, upstream=(4.0, 4.0), bias=True) for m in _MODES])


def _auto(ranks: Ranks) -> list[float]:
    few, many = Case((2, 1), 40, mode="auto"), Case((30, 21), 8, mode="auto")
    return worst_errors(ranks, [few, many])


def test_auto_chooses_the_same_everywhere() -> None:
    for errors in gang(2).run(_auto):
        assert max(errors) < _EXACT


def _twice(ranks: Ranks, mode: RingMode, reduction: Reduction) -> tuple[bool, bool]:
    torch.manual_seed(ranks.rank)
    hidden = torch.randn(4, 6, requires_grad=True)
    weight = torch.randn(5, 6, requires_grad=True)
    targets = torch.randint(0, 5 * ranks.size, (4,))
    loss = ring_dtp(hidden, weight, targets, ranks=ranks, mode=mode, reduction=reduction)
    upstream = torch.ones_like(loss)
    first = torch.autograd.grad(loss, (hidden, weight), upstream, retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), upstream)
    return torch.equal(first[0], second[0]), torch.equal(first[1], second[1])


def test_backward_may_run_again() -> None:
    for mode, reduction in product(_MODES, _REDUCTIONS):
        assert gang(2).run(_twice, mode, reduction) == [(True, True)] * 2


def _tied(ranks: Ranks, mode: RingMode) -> float:
    # one parameter is embedding and head; two micro-batches accumulate into a .grad that holds ones
    torch.manual_seed(0)
    table = torch.randn(4 * ranks.size, 6, dtype=torch.float64)
    ids = torch.randint(0, 4, (2, 5)) + 4 * ranks.rank  # own shard's rows: the lookup needs no communication
    targets = torch.randint(0, table.shape[0], (2, ranks.size, 5))
    own = table[4 * ranks.rank : 4 * ranks.rank + 4].clone().requires_grad_()
    own.grad = torch.ones_like(own)
    for step in range(2):
        hidden = own[ids[step] - 4 * ranks.rank]
        ring_dtp(
            hidden,
            own,
            targets[step, ranks.rank],
            ranks=ranks,
            mode=mode,
            reduction="sum",
        ).backward()
    whole = table.clone().requires_grad_()
    torch.manual_seed(0)
    torch.randn(4 * ranks.size, 6, dtype=torch.float64)
    local = torch.randint(0, 4, (2, 5))
    for step in range(2):
        for rank in range(ranks.size):
            hidden = whole[local[step] + 4 * rank]
            logits = hidden @ whole.t()
            torch.nn.functional.cross_entropy(logits, targets[step, rank], reduction="sum").backward()
    assert whole.grad is not None
    right = 1 + whole.grad[4 * ranks.rank : 4 * ranks.rank + 4]
    return float((own.grad - right).abs().max())


def test_tied_embedding_accumulates_once_into_a_filled_gradient() -> None:
    for mode in _MODES:
        assert max(gang(2).run(_tied, mode)) < _EXACT


def _same_token_everywhere(ranks: Ranks, mode: RingMode, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    hidden = torch.randn(9, 6).to(dtype)
    weight = torch.randn(4 * ranks.size, 6).to(dtype)
    targets = torch.randint(0, 4 * ranks.size, (9,))
    own = weight[4 * ranks.rank : 4 * ranks.rank + 4]
    # one shard's logits are all −∞: finite on every rank, wherever its ring starts
    bias = torch.full((4,), -torch.inf) if ranks.rank == 1 else torch.zeros(4)
    targets[targets // 4 == 1] = 0
    with torch.no_grad():
        return ring_dtp(
            hidden,
            own,
            targets,
            ranks=ranks,
            mode=mode,
            bias=bias,
            reduction="none",
            strip_rows=4,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_agree_bit_for_bit_wherever_the_ring_starts(dtype: torch.dtype) -> None:
    for mode in _RINGS:
        losses = gang(4).run(_same_token_everywhere, mode, dtype)
        assert torch.isfinite(losses[0]).all()
        for loss in losses[1:]:
            assert torch.equal(loss, losses[0]), mode


def _logprobs(ranks: Ranks, mode: RingMode) -> float:
    torch.manual_seed(0)
    hidden = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 6, dtype=torch.float64)
    targets = torch.tensor([0, 7, -100, 3, 4])
    rows = slice(8 // ranks.size * ranks.rank, 8 // ranks.size * (ranks.rank + 1))
    loss, logprobs = ring_dtp(
        hidden,
        weight[rows],
        targets,
        ranks=ranks,
        mode=mode,
        reduction="sum",
        return_logprobs=True,
    )
    (loss + (logprobs.exp() * 3).sum()).backward()
    reference = hidden.detach().clone().requires_grad_()
    picked = torch.log_softmax(reference @ weight.t(), 1).gather(1, targets.clamp(0).unsqueeze(1)).squeeze(1)
    picked = torch.where(targets == -100, 0.0, picked)
    (-picked.sum() + (picked.exp() * 3).sum()).backward()
    assert hidden.grad is not None
    assert reference.grad is not None
    return max(float((logprobs - picked).abs().max()), float((hidden.grad - reference.grad).abs().max()))


def test_log_probabilities_come_along_and_are_differentiable() -> None:
    for mode in _MODES:
        assert max(gang(2).run(_logprobs, mode)) < _EXACT


def _frozen(ranks: Ranks, mode: RingMode, hidden_grad: bool) -> bool:
    torch.manual_seed(0)
    hidden = torch.randn(3, 6, requires_grad=hidden_grad)
    weight = torch.randn(4, 6, requires_grad=not hidden_grad)
    ring_dtp(hidden, weight, torch.tensor([0, 1, 2]), ranks=ranks, mode=mode).backward()
    return (hidden.grad is not None, weight.grad is not None) == (hidden_grad, not hidden_grad)


def test_a_frozen_input_gets_no_gradient() -> None:
    for mode, hidden_grad in product(_MODES, (False, True)):
        assert gang(2).run(_frozen, mode, hidden_grad) == [True, True]


def _broken(ranks: Ranks, what: str) -> str:
    hidden, weight = torch.randn(3, 6), torch.randn(4, 6)
    targets = torch.zeros(3, dtype=torch.int64)
    mode: RingMode = "activations"
    bias, ignore_index, strip_rows = torch.zeros(4), -100, 3
    if what == "bias":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
    if ranks.rank == 1:
        if what == "target":
            targets[1] = 8
        elif what == "negative":
            targets[1] = -7
        elif what == "length":
            targets = targets[:2]
        elif what == "dtype":
            weight = weight.half()
        elif what == "mode":
            mode = "weights"
        elif what == "word":
            mode = "ring"  # type: ignore[assignment]
        elif what == "bias":
            bias = bias.bfloat16()
        elif what == "device":
            targets = targets.to("meta")
        elif what == "ignore":
            ignore_index = None  # type: ignore[assignment]
        elif what == "rows":
            strip_rows = 2.5  # type: ignore[assignment]
        elif what == "width":
            hidden, weight = torch.randn(3, 5), torch.randn(4, 5)
        else:
            weight.requires_grad_()
    try:
        ring_dtp(
            hidden,
            weight,
            targets,
            ranks=ranks,
            mode=mode,
            bias=bias,
            ignore_index=ignore_index,
            strip_rows=strip_rows,
        )
    except RuleError as error:
        return error.rule
    return "no error"


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("target", r"in \[0, 8\)"),
        ("negative", r"in \[0, 8\)"),
        ("length", "one per row"),
        ("dtype", "one dtype"),
        ("mode", "agree on: mode"),
        ("word", "agree on: mode|mode is one of"),
        ("width", "agree on: hidden width"),
        ("bias", "agree on: bias and its dtype"),
        ("device", "lie on one device"),
        ("ignore", "agree on: mode|ignore_index is a whole number"),
        ("rows", "agree on: mode|strip_rows is a whole number"),
        ("grad", "agree on: gradients"),
    ],
)
def test_one_ranks_wrong_input_raises_on_all(what: str, rule: str) -> None:
    for answer in gang(2).run(_broken, what):
        assert re.search(rule, answer), answer


def test_wrong_options_name_the_rule() -> None:
    hidden, weight, targets = torch.randn(3, 6), torch.randn(4, 6), torch.zeros(3, dtype=torch.int64)
    for wrong in (
        {"mode": "ring"},
        {"reduction": "max"},
        {"strip_rows": 0},
        {"token_count": -1},
        {"gradient_hop": "late"},
    ):
        with pytest.raises(RuleError) as caught:
            ring_dtp(hidden, weight, targets, ranks=LoopbackRanks(1), **wrong)
        assert caught.value.remedy


@pytest.mark.parametrize("mode", _MODES)
def test_bf16_weight_gradient_error_is_flat_in_the_tile_count(mode: RingMode) -> None:
    errors = []
    tokens = 512
    for tiles in (1, 16, 256):
        case = Case((tokens,), 50, mode=mode, strip_rows=tokens // tiles, dtype=torch.bfloat16, ignored=0.0)
        got = run(LoopbackRanks(1), case)["weight"]
        right = dense(case)[2]
        errors.append(float((got.double() - right).norm() / right.norm()))
    assert max(errors) < 1.2 * min(errors), errors
    assert max(errors) < 0.01
