"""Closed-form bytes of a vocabulary-parallel head with travelling strips (theory: Ring-DTP), for planning.

Stated independently of the operator's own bound and held equal to it by a test. Symbols: N tokens of the rank
with most, H hidden width, V vocabulary, P vocabulary ranks, v = ⌈V/P⌉, b bytes of a scalar, a = max(4, b).
"""

from __future__ import annotations

from cost_model.errors import RuleError

GIB = 2**30
_MODES = frozenset({"activations", "weights", "gather"})
_PASSES = frozenset({"forward", "backward"})
_HOPS = frozenset({"serial", "overlapped"})


def resolve_ring_mode(tokens: int, vocab: int, vocab_ranks: int) -> str:
    """``weights`` iff N > ⌈V/P⌉, else ``activations``: move what is smaller."""
    return "activations" if tokens <= _shard(vocab, vocab_ranks) else "weights"


def default_strip_rows(columns: int, scalar_bytes: int, *, gathered: bool = False) -> int:
    """Rows the operator takes when it is told none: tiles of 400 MiB, 1600 MiB over a gathered vocabulary."""
    row_bytes = max(1, _padded(columns) * scalar_bytes)
    fits = (1600 if gathered else 400) * 2**20 // row_bytes
    return max(256, fits - fits % 256)


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
    """Bytes of one rank in one pass: ``strips``, ``movers``, ``accumulators``, ``inputs_outputs``.

    Args:
        ring_mode: ``activations``, ``weights``, ``gather`` or ``auto``.
        strip_rows: n_t, most rows of a tile of logits.
        pass_: ``forward`` or ``backward``; a gathered head makes its gradients in forward.
        gradient_hop: ``serial`` (two movers beyond the result in backward) or ``overlapped`` (three).

    Returns:
        Upper bounds in bytes whose sum bounds the peak, inputs and outputs included.

    Raises:
        RuleError: an unknown word or a size that is not positive.
    """
    mode = resolve_ring_mode(tokens, vocab, vocab_ranks) if ring_mode == "auto" else ring_mode
    _require(mode in _MODES, "ring_mode is activations, weights, gather or auto", ring_mode)
    _require(pass_ in _PASSES, "pass_ is forward or backward", pass_)
    _require(gradient_hop in _HOPS, "gradient_hop is serial or overlapped", gradient_hop)
    sizes = (hidden, vocab, vocab_ranks, strip_rows, scalar_bytes)
    _require(tokens >= 0 and min(sizes) >= 1, "sizes are positive, tokens not negative", (tokens, *sizes))

    a = max(4, scalar_bytes)
    v = _shard(vocab, vocab_ranks)
    x, w = tokens * hidden, v * hidden
    io = (x + w) * scalar_bytes
    if mode == "gather":
        movers, sums, made = _gathered(x, w, vocab * hidden, vocab_ranks, b=scalar_bytes, pass_=pass_)
    else:
        movers, sums, made = _ring(
            x,
            w,
            x if mode == "activations" else w,
            vocab_ranks,
            b=scalar_bytes,
            pass_=pass_,
            hop=gradient_hop,
        )
    return {
        "strips": _strips(
            tokens, hidden, vocab, vocab_ranks, mode=mode, strip_rows=strip_rows, b=scalar_bytes
        ),
        "movers": movers,
        "accumulators": sums,
        "inputs_outputs": io + made + tokens * (16 + a),
    }


def materialised_head_bytes(*, tokens: int, hidden: int, vocab: int, scalar_bytes: int = 4) -> int:
    """3·N·V·b + H·V·b + N·H·b + 0.063 GiB: a head that keeps logits, log-softmax and their gradient."""
    scalars = 3 * tokens * vocab + hidden * vocab + tokens * hidden
    return scalars * scalar_bytes + round(0.063 * GIB)


def _strips(n: int, hidden: int, vocab: int, ranks: int, *, mode: str, strip_rows: int, b: int) -> int:
    """One tile, the scratch of its epilogues, and what is kept a token (targets, statistics, log-sum-exp)."""
    a = max(4, b)
    columns = vocab if mode == "gather" else _shard(vocab, ranks)
    rows = min(n, strip_rows)
    tile = rows * _padded(columns) * b
    scratch = a * min(rows * columns, max(columns, 2**18))
    cast = 0 if b >= a else 1024 * (hidden + 256)
    token = 24 * a
    if mode == "activations":
        token += ranks * (16 + 6 * a)
    elif mode == "weights":
        token += ranks * 3 * a
    else:
        token += 3 * a
    return tile + scratch + cast + n * token + 4 * a * vocab + 2**16


def _ring(x: int, w: int, mover: int, ranks: int, *, b: int, pass_: str, hop: str) -> tuple[int, int, int]:
    """``(movers, accumulators, outputs)`` of a mode in which ``mover`` scalars travel."""
    a = max(4, b)
    if pass_ == "forward":  # noqa: S105
        return min(2, ranks - 1) * mover * b, 0, 0
    movers = 0 if ranks == 1 else (2 + (hop == "overlapped")) * mover * a
    if b == a:
        return movers, 0, (x + w) * b
    return movers, (x + w) * a, max(0, (x + w) * b - movers)


def _gathered(x: int, w: int, whole: int, ranks: int, *, b: int, pass_: str) -> tuple[int, int, int]:
    """``(movers, accumulators, outputs)`` with all ``whole`` scalars of the head on every rank."""
    a = max(4, b)
    again = (x + w) * b if pass_ == "backward" else 0  # noqa: S105
    if ranks == 1:
        return 0, whole * a if b < a else 0, (x + w) * b + again
    return max(whole * b, w * (a + b)), whole * a, x * b + again


def _shard(vocab: int, ranks: int) -> int:
    return -(-vocab // max(1, ranks))


def _padded(columns: int) -> int:
    return (columns + 63) // 64 * 64


def _require(holds: bool, rule: str, value: object) -> None:
    if not holds:
        raise RuleError(rule=rule, value=value, remedy="Give the launch's own words and sizes.")
