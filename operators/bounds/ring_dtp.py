"""Bytes that Ring-DTP may hold, term by term, and the knobs' defaults. No torch.

Symbols: N tokens of the rank with most, H hidden width, V vocabulary, P vocabulary ranks, v = ⌈V/P⌉ rows of a
shard, n_t rows of a tile, b bytes of a scalar, a = max(4, b) bytes of an accumulator.
"""

from __future__ import annotations

from typing import Literal

from operators.errors import RuleError

_ALIGN = 64
_TILE_BYTES = 400 << 20
_GATHERED_TILE_BYTES = 4 * _TILE_BYTES
_LEAST_ROWS = 256
_SCRATCH_ELEMENTS = 1 << 18
_CAST_ROWS = 256
_SMALL_ALLOCATIONS = 64 << 10
MODES = ("activations", "weights", "gather")


def resolve_ring_mode(tokens: int, vocab: int, vocab_ranks: int) -> Literal["activations", "weights"]:
    """What ``auto`` moves: the weights iff N > ⌈V/P⌉, for a hop of them is then the smaller one."""
    return "weights" if tokens > -(-vocab // vocab_ranks) else "activations"


def padded_columns(columns: int) -> int:
    """Columns of a tile in memory: its rows start on 64-element boundaries."""
    return -(-columns // _ALIGN) * _ALIGN


def default_strip_rows(columns: int, scalar_bytes: int, *, gathered: bool = False) -> int:
    """Rows of a tile of about 400 MiB (1.6 GiB over a gathered vocabulary).

    4096 fp32 or 8192 bf16 rows of 25,000 columns; 4096 bf16 rows of 200,000: enough for efficient GEMMs.
    """
    budget = _GATHERED_TILE_BYTES if gathered else _TILE_BYTES
    rows = budget // max(1, padded_columns(columns) * scalar_bytes)
    return max(_LEAST_ROWS, rows // _LEAST_ROWS * _LEAST_ROWS)


def scratch_elements(rows: int, columns: int) -> int:
    """Elements of the largest temporary that the torch epilogues make for a tile."""
    return min(rows * columns, max(columns, _SCRATCH_ELEMENTS))


def ring_dtp_terms(
    *,
    tokens: int,
    hidden: int,
    vocab: int,
    vocab_ranks: int,
    ring_mode: str,
    strip_rows: int,
    pass_: str,
    scalar_bytes: int = 2,
    gradient_hop: str = "serial",
) -> dict[str, int]:
    """Upper bound of the bytes live on one rank during ``pass_``, inputs and outputs included.

    Args:
        ring_mode: ``activations``, ``weights``, ``gather`` (whose forward makes the gradients) or ``auto``.
        pass_: ``forward`` or ``backward``.
        gradient_hop: ``serial`` or ``overlapped`` (one more mover in backward).

    Returns:
        ``strips``: the tile, the epilogues' scratch, statistics and other numbers a token.
        ``movers``: what travels, beyond the tensors at home. ``accumulators``: fp32 sums beside the outputs.
        ``inputs_outputs``: X, W shard, targets, loss, and dX, dW as far as they take more than the movers left.
        The peak is at most the sum.

    Raises:
        RuleError: an unknown mode, pass or hop, or a size that is not positive.
    """
    if ring_mode == "auto":
        ring_mode = resolve_ring_mode(tokens, vocab, vocab_ranks)
    _check(ring_mode, pass_, gradient_hop, tokens, hidden, vocab, vocab_ranks, strip_rows, scalar_bytes)
    exact = max(4, scalar_bytes)
    shard = -(-vocab // vocab_ranks)
    backward, gather, alone = pass_ != "forward", ring_mode == "gather", vocab_ranks == 1  # noqa: S105
    state, weights = tokens * hidden, shard * hidden

    columns = vocab if gather else shard
    rows = min(strip_rows, tokens)
    strips = rows * padded_columns(columns) * scalar_bytes + scratch_elements(rows, columns) * exact
    if scalar_bytes < exact:
        strips += 4 * _CAST_ROWS * (hidden + _CAST_ROWS)
    per_token = {
        "activations": vocab_ranks * (16 + 6 * exact),
        "weights": vocab_ranks * 3 * exact,
        "gather": 3 * exact,
    }[ring_mode] + 24 * exact
    strips += tokens * per_token + 4 * exact * vocab + _SMALL_ALLOCATIONS

    own = (state + weights) * scalar_bytes
    outputs, accumulators, movers = 0, 0, 0
    if gather:
        whole = vocab * hidden
        # the reduction of the gradient starts when the gathered weights are gone
        if not alone:
            movers = max(whole * scalar_bytes, weights * (exact + scalar_bytes))
        if not alone or scalar_bytes < exact:
            accumulators = whole * exact
        outputs = state * scalar_bytes + (weights * scalar_bytes if alone else 0)
        if backward:  # a replay beside the gradients that forward made
            outputs += own
    else:
        mover = state if ring_mode == "activations" else weights
        if backward:
            slots = 3 if gradient_hop == "overlapped" else 2
            movers = 0 if alone else slots * mover * exact
            outputs = own
            if scalar_bytes < exact:
                accumulators = (state + weights) * exact
                outputs = max(0, own - movers)  # rounded from the sums when the movers are gone
        else:
            movers = min(2, vocab_ranks - 1) * mover * scalar_bytes
    return {
        "strips": strips,
        "movers": movers,
        "accumulators": accumulators,
        "inputs_outputs": own + outputs + tokens * (16 + exact),
    }


def materialised_head_bytes(*, tokens: int, hidden: int, vocab: int, scalar_bytes: int = 4) -> int:
    """Peak of a head that keeps its logits, forward and backward: 3·N·V + V·H + N·H scalars and 0.063 GiB.

    The three are logits, log-softmax and their gradient; the constant is the GEMM library's workspace.
    """
    return scalar_bytes * (3 * tokens * vocab + vocab * hidden + tokens * hidden) + round(0.063 * 2**30)


def _check(ring_mode: str, pass_: str, gradient_hop: str, *sizes: int) -> None:
    for name, value, allowed in (
        ("ring_mode", ring_mode, MODES),
        ("pass_", pass_, ("forward", "backward")),
        ("gradient_hop", gradient_hop, ("serial", "overlapped")),
    ):
        if value not in allowed:
            raise RuleError(
                rule=f"{name} is one of {', '.join(allowed)}",
                value=value,
                remedy=f"Pass one of them as {name}.",
            )
    if min(sizes[1:]) < 1 or sizes[0] < 0:
        raise RuleError(
            rule="hidden, vocab, vocab_ranks, strip_rows and scalar_bytes are positive, tokens not negative",
            value=sizes,
            remedy="Give the sizes of the launch.",
        )
