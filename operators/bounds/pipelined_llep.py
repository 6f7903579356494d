"""Memory bound of PipelinedLLEP, term by term (Eq. 1 and what it leaves out).

The live sets of a pass are listed stage by stage, as the schedule holds them; the bound is the largest. Bytes
of the expert weights and of their gradients in the weights' own dtype are not in here (4Θ/W of Eq. 6 has
them).
"""

from __future__ import annotations

from operators.errors import RuleError

TERMS = ("dispatch_buffers", "intermediates", "migrated_experts", "accumulators", "inputs_outputs")
_INDEX_BYTES = 4
_IS_BACKWARD = {"forward": False, "backward": True}


def chunk_count(*, tokens_max: int, chunk_tokens: int, max_chunks: int) -> int:
    """K of Eq. 1, at least 1; ``tokens_max`` is the largest token count of the group."""
    return max(1, min(-(-tokens_max // chunk_tokens), max_chunks))


def effective_chunk(tokens: int, chunks: int) -> int:
    """c_eff = ⌈N/K⌉, tokens a source rank really puts in a chunk."""
    return -(-tokens // chunks)


def buffer_bytes(
    *, tokens: int, hidden: int, top_k: int, expert_ranks: int, chunks: int, scalar_bytes: int = 2
) -> int:
    """Eq. 1: 2·E_p·k·c_eff·H·b, dispatch and combine buffers for any router (the guarantee)."""
    return 2 * expert_ranks * top_k * effective_chunk(tokens, chunks) * hidden * scalar_bytes


def expected_buffer_bytes(
    *,
    tokens: int,
    hidden: int,
    top_k: int,
    expert_ranks: int,
    chunks: int,
    scalar_bytes: int = 2,
    alpha: float = 1.0,
) -> int:
    """Eq. 1 with the receive that balancing leaves: α·k·c_eff rows a rank instead of E_p·k·c_eff."""
    whole = buffer_bytes(
        tokens=tokens,
        hidden=hidden,
        top_k=top_k,
        expert_ranks=expert_ranks,
        chunks=chunks,
        scalar_bytes=scalar_bytes,
    )
    return int(whole * min(alpha, expert_ranks) / expert_ranks)


def most_rows(
    *, tokens: int, experts: int, top_k: int, expert_ranks: int, chunks: int, migrated_experts: int = 0
) -> int:
    """Rows a rank can receive in a chunk from any router that picks distinct experts.

    A token needs a destination at most as often as experts live there: E_p·min(k, hosted)·c_eff.
    """
    hosted = experts // expert_ranks + migrated_experts
    return expert_ranks * min(top_k, hosted) * effective_chunk(tokens, chunks)


def pipelined_llep_terms(
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    expert_ranks: int,
    chunks: int,
    schedule: str,
    pass_: str,
    scalar_bytes: int = 2,
    rows_per_chunk: int | None = None,
    migrated_experts: int = 0,
    sent_experts: int | None = None,
) -> dict[str, int]:
    """Bytes of the largest live set of one layer in one pass; the peak is their sum.

    Args:
        tokens: N, the largest of the group.
        hidden: H.
        intermediate: I.
        experts: E over the group.
        top_k: k.
        expert_ranks: E_p.
        chunks: K.
        schedule: ``serial``, ``prefetch`` or ``overlap``.
        pass_: ``forward`` or ``backward``.
        scalar_bytes: b of activations and weights.
        rows_per_chunk: Rows this rank receives in its largest chunk; None for the guarantee, which holds for
            any router whose tokens pick distinct experts.
        migrated_experts: Guests this rank computes for others.
        sent_experts: Copies of its own experts that it sends out; None: as many as it has guests.

    Returns:
        Bytes under the names of ``TERMS``.

    Raises:
        RuleError: unknown schedule or pass.
    """
    if schedule not in {"serial", "prefetch", "overlap"} or pass_ not in _IS_BACKWARD:
        raise RuleError(
            rule="schedule is serial, prefetch or overlap, and pass_ is forward or backward",
            value=(schedule, pass_),
            remedy="Use the names of the launch file.",
        )
    send = top_k * effective_chunk(tokens, chunks)
    receive = rows_per_chunk
    if receive is None:
        receive = most_rows(
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            expert_ranks=expert_ranks,
            chunks=chunks,
            migrated_experts=migrated_experts,
        )
    row = hidden * scalar_bytes
    inner = receive * intermediate * scalar_bytes
    wide = max(4, scalar_bytes)
    local = experts // expert_ranks
    per_expert = 3 * hidden * intermediate + 2 * intermediate + hidden
    guest_weights = migrated_experts * per_expert * scalar_bytes
    routes, received = tokens * top_k, chunks * receive
    index = _INDEX_BYTES * (3 * (routes + received) + chunks * (local + migrated_experts))
    ahead = schedule != "serial" and chunks > 1
    returning = receive + send if schedule == "overlap" and chunks > 1 else 0
    backward = _IS_BACKWARD[pass_]
    # Stages as (rows of dispatch buffers, intermediates in units of rows × I).
    rows = _backward(send, receive, returning) if ahead else _backward_serial(send, receive)
    if not backward:
        rows = _forward(send, receive, send + receive if ahead else 0, returning)
    scalars = (wide + scalar_bytes) * routes + (wide * (2 * received + receive) if backward else 0)
    sent = migrated_experts if sent_experts is None else sent_experts
    # A single product per weight is its gradient already, in the weights' dtype; sums are kept wide.
    total_bytes = scalar_bytes if chunks == 1 and migrated_experts == sent == 0 else wide
    matrices, biases = 3 * hidden * intermediate, 2 * intermediate + hidden
    own_totals = local * (matrices * total_bytes + biases * wide) if backward else 0
    guest_totals = migrated_experts * per_expert * wide if backward else 0
    ends = (4 if backward else 2) * tokens * row
    stages = [
        (buffers * row, halves * inner + scalars + index, guest_weights + guest_totals)
        for buffers, halves in rows
    ]
    # Migration happens before the first chunk (a copy to send) and, in backward, after the last (gradients
    # that came home); the gate and up weights are the largest.
    largest = sent * 2 * hidden * intermediate
    stages.append(
        (0, scalars + index, guest_weights + guest_totals + largest * (wide if backward else scalar_bytes))
    )
    # Planning sorts the routes and expands index tensors; per-layer scalars are packed and unpacked.
    stages.append((0, index + 40 * routes + 24 * max(routes, received), guest_weights + guest_totals))
    buffers_bytes, inner_bytes, guest_bytes = max(stages, key=sum)
    return {
        "dispatch_buffers": buffers_bytes,
        "intermediates": inner_bytes,
        "migrated_experts": guest_bytes,
        "accumulators": own_totals,
        "inputs_outputs": ends,
    }


def _forward(send: int, receive: int, ahead: int, returning: int) -> list[tuple[int, int]]:
    return [
        (send + receive + returning, 0),  # rows under way
        (2 * receive + returning, 0),  # put into slot order
        (receive + ahead + returning, 2),  # first layer
        (ahead + returning, 3),  # activation
        (receive + ahead + returning, 1),  # second layer
        (2 * receive + ahead, 0),  # put into arrival order
        (receive + send + ahead, 0),  # on the way back
    ]


def _backward_serial(send: int, receive: int) -> list[tuple[int, int]]:
    return [
        (2 * receive, 0),  # output gradients, put into slot order
        (2 * receive + send, 0),  # inputs under way
        (3 * receive, 0),  # put into slot order
        (2 * receive, 3),  # both layers' products, activation and its derivative
        (receive, 2),  # input gradients
        (2 * receive, 0),  # put into arrival order
        (receive + send, 0),  # on the way back
    ]


def _backward(send: int, receive: int, returning: int) -> list[tuple[int, int]]:
    return [
        (2 * (send + receive), 0),  # both kinds of rows of the first chunk under way
        (3 * receive + max(send, returning), 0),  # put into slot order, one after the other
        (3 * receive + send + returning, 3),  # compute; the next output gradients under way
        (3 * receive + send, 2),  # next inputs under way, too
        (4 * receive, 0),  # input gradients put into arrival order
        (3 * receive + send, 0),  # on the way back
    ]
