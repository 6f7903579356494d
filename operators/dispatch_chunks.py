"""Moving one chunk: to the experts and back.

Shape suffixes: N tokens, H hidden width, R rows received, Q rows sent, S slots.
"""

from __future__ import annotations

from torch import Tensor

from operators.dispatch_plan import DispatchPlan
from operators.kernels.route import combine_rows, gather_rows
from operators.ranks import Pending, Ranks


class Transfer:
    """Rows under way, with the buffers they need. :meth:`take` waits, frees the source, gives the rows."""

    def __init__(self, pending: Pending, output: Tensor, source: Tensor) -> None:
        self._pending: Pending | None = pending
        self._output: Tensor | None = output
        self._source: Tensor | None = source

    def wait(self) -> None:
        """Order the current stream behind the transfer; its source buffer is free from here on."""
        if self._pending is not None:
            self._pending.wait()
            # Freed only behind the wait: the allocator may reuse it on the current stream at once.
            self._pending = self._source = None

    def take(self) -> Tensor:
        """The rows that arrived. Only once: this object keeps no reference."""
        self.wait()
        output, self._output = self._output, None
        assert output is not None, "a transfer is taken once"
        return output


def dispatch(plan: DispatchPlan, ranks: Ranks, chunk: int, rows_NH: Tensor) -> Transfer:
    """Send a chunk's rows to the ranks of their experts."""
    send_QH = gather_rows(rows_NH, plan.send_rows[plan.send_range(chunk)])
    output_RH = rows_NH.new_empty(plan.received(chunk), rows_NH.shape[1])
    pending = ranks.all_to_all(output_RH, send_QH, plan.receive_splits[chunk], plan.send_splits[chunk])
    return Transfer(pending, output_RH, send_QH)


def take_sorted(plan: DispatchPlan, chunk: int, transfer: Transfer) -> Tensor:
    """What arrived, in slot order."""
    return gather_rows(transfer.take(), plan.sort_index[plan.receive_range(chunk)])


def arrival_order(plan: DispatchPlan, chunk: int, rows_RH: Tensor) -> Tensor:
    """Rows in slot order -> the order they came in, ready to go back."""
    return gather_rows(rows_RH, plan.back_index[plan.receive_range(chunk)])


def send_back(plan: DispatchPlan, ranks: Ranks, chunk: int, arrival_RH: Tensor) -> Transfer:
    """Return a chunk's rows to the ranks they came from."""
    output_QH = arrival_RH.new_empty(plan.sent(chunk), arrival_RH.shape[1])
    pending = ranks.all_to_all(output_QH, arrival_RH, plan.send_splits[chunk], plan.receive_splits[chunk])
    return Transfer(pending, output_QH, arrival_RH)


def combine(
    plan: DispatchPlan, chunk: int, transfer: Transfer, weights_NK: Tensor | None, out_NH: Tensor
) -> None:
    """Sum the returned routes of every token of the chunk into its row of ``out``."""
    tokens = plan.chunk_tokens(chunk)
    weights = None if weights_NK is None else weights_NK[tokens]
    combine_rows(transfer.take(), plan.positions_NK[tokens], weights, out_NH[tokens])


def scalars_to_experts(plan: DispatchPlan, ranks: Ranks, values_NK: Tensor) -> Tensor:
    """One value per route, all chunks at once: ``[N, K]`` -> ``[received]`` in (chunk, slot) order."""
    send = values_NK.flatten()[plan.route_order]
    arrived = send.new_empty(plan.scalar_index.shape[0])
    ranks.all_to_all(arrived, send, plan.scalar_receive_splits, plan.scalar_send_splits).wait()
    return arrived[plan.scalar_index]


def scalars_to_tokens(plan: DispatchPlan, ranks: Ranks, values: Tensor) -> Tensor:
    """The way back of :func:`scalars_to_experts`."""
    send = values.new_empty(values.shape[0]).scatter_(0, plan.scalar_index.long(), values)
    back = values.new_empty(plan.tokens * plan.top_k)
    ranks.all_to_all(back, send, plan.scalar_send_splits, plan.scalar_receive_splits).wait()
    out = back.new_empty(back.shape[0]).scatter_(0, plan.route_order.long(), back)
    return out.view(plan.tokens, plan.top_k)
