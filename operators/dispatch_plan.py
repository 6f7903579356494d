"""The plan of one layer's dispatch: who sends which rows where, chunk by chunk.

Every rank counts its routes by (chunk, expert), the counts are gathered, and from the counts alone every rank
derives the least-loaded plan and all send and receive splits: one host sync per layer in forward, none in
backward. The plan is what backward and recompute replay.

A source rank's local order of an expert's rows is by turns over the chunks: the first row of every chunk, then
the second of every chunk, and so on. A piece of the global list therefore holds nearly equal shares of every
chunk, and the share follows from the counts.

Shape suffixes: P ranks, C chunks, E experts, B pieces of the plan, N tokens, K experts a token picks, S slots
(experts a rank computes: its own, then guests in rising order).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from operators.dispatch_agreement import NOTHING_SAID, Statement, agree_on_sizes, compare, size_code
from operators.dispatch_launch import DispatchLaunch
from operators.errors import RuleError
from operators.least_loaded import LeastLoadedPlan, plan_least_loaded
from operators.ranks import Ranks
from operators.routing import Routing

# Which planning a routing record stands for, equal on all ranks: rank 0's running number, taken the first time the
# record is planned. A recompute that replays the record must meet peers that replay the same one.
_number_of: WeakKeyDictionary[Routing, int] = WeakKeyDictionary()
_numbers = count(1)
_UNSAID = 0
_HEADER = 4  # numbers behind a rank's counts


@dataclass(frozen=True)
class Migration:
    """Expert weights on their way to guests: by peer, in rising expert order."""

    send_experts: tuple[tuple[int, ...], ...]
    """``[P]``: own experts (local numbers) that each rank computes as guests."""
    receive_counts: tuple[int, ...]
    """``[P]``: how many of this rank's guests each rank owns."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """One rank's view. Splits are rows; index tensors are int32 on the layer's device."""

    chunks: int
    tokens: int
    top_k: int
    experts: int
    ranks: int
    rank: int
    number: int
    """Names this layer call on all ranks: backward checks that its peers are in the same one."""
    least_loaded: LeastLoadedPlan
    slots: tuple[int, ...]
    """Global expert numbers in slot order."""
    send_splits: tuple[tuple[int, ...], ...]
    """``[C][P]``."""
    receive_splits: tuple[tuple[int, ...], ...]
    """``[C][P]``."""
    slot_rows: tuple[tuple[int, ...], ...]
    """``[C][S]`` rows of every slot, own experts first."""
    migration: Migration | None
    """None when no expert has a guest: on all ranks alike."""
    slot_ends_CS: Tensor  # noqa: N815 - shape suffix
    """``[C, S]`` where every slot's rows end within the chunk (what a grouped matmul wants)."""
    send_rows: Tensor
    """``[N·K]`` token of every sent row, chunk by chunk, in send order."""
    positions_NK: Tensor  # noqa: N815 - shape suffix
    """``[N, K]`` place of a token's route in its chunk's send order."""
    sort_index: Tensor
    """``[received]`` chunk by chunk: from arrival order (source, slot) into slot order."""
    back_index: Tensor
    """``[received]`` chunk by chunk: from slot order back into arrival order."""
    route_order: Tensor
    """``[N·K]`` route numbers by (destination, chunk, slot): the order of per-layer scalars."""
    scalar_index: Tensor
    """``[received]`` from the arrival order of per-layer scalars into (chunk, slot) order."""

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def guests(self) -> int:
        return len(self.slots) - self.local_experts

    @property
    def one_product(self) -> bool:
        """Whether each weight gradient of this rank is one product: one chunk, no guest here or elsewhere."""
        sends = self.migration is not None and any(self.migration.send_experts)
        return self.chunks == 1 and self.guests == 0 and not sends

    @cached_property
    def _sent_ranges(self) -> list[slice]:
        return _ranges([sum(row) for row in self.send_splits])

    @cached_property
    def _received_ranges(self) -> list[slice]:
        return _ranges([sum(row) for row in self.receive_splits])

    @cached_property
    def slot_slices(self) -> list[list[tuple[int, slice]]]:
        """``[C]`` the slots that have rows in a chunk, with their rows."""
        return [
            [(s, rows) for s, rows in enumerate(_ranges(list(row))) if rows.stop > rows.start]
            for row in self.slot_rows
        ]

    def sent(self, chunk: int) -> int:
        rows = self._sent_ranges[chunk]
        return int(rows.stop - rows.start)

    def received(self, chunk: int) -> int:
        rows = self._received_ranges[chunk]
        return int(rows.stop - rows.start)

    @property
    def received_most(self) -> int:
        """Largest receive of one chunk, rows."""
        return max(self.received(i) for i in range(self.chunks))

    def send_range(self, chunk: int) -> slice:
        return self._sent_ranges[chunk]

    def receive_range(self, chunk: int) -> slice:
        return self._received_ranges[chunk]

    def chunk_tokens(self, chunk: int) -> slice:
        """Token positions of a chunk: chunk, chunk + C, chunk + 2C, …"""
        return slice(chunk, self.tokens, self.chunks)

    @property
    def scalar_send_splits(self) -> list[int]:
        return [sum(row[r] for row in self.send_splits) for r in range(self.ranks)]

    @property
    def scalar_receive_splits(self) -> list[int]:
        return [sum(row[r] for row in self.receive_splits) for r in range(self.ranks)]

    def check_routing(self, routing: Routing, ranks: Ranks) -> None:
        """Refuse a plan that was made for other tokens or another group.

        Raises:
            RuleError: sizes differ.
        """
        mine = (self.tokens, self.top_k, self.experts, self.ranks, self.rank)
        given = (routing.tokens, routing.top_k, routing.experts, ranks.size, ranks.rank)
        if mine != given:
            raise RuleError(
                rule=f"a plan runs the routing it was made from: (tokens, top_k, experts, ranks, rank) = {mine}",
                value=given,
                remedy="Make the plan from this routing with make_plan, or leave it out.",
            )

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> DispatchPlan:
        """The same plan with every index tensor changed, e.g. into a fake one for a dry run."""
        return replace(
            self,
            slot_ends_CS=change(self.slot_ends_CS),
            send_rows=change(self.send_rows),
            positions_NK=change(self.positions_NK),
            sort_index=change(self.sort_index),
            back_index=change(self.back_index),
            route_order=change(self.route_order),
            scalar_index=change(self.scalar_index),
        )


def make_plan(
    routing: Routing, ranks: Ranks, launch: DispatchLaunch, statement: Statement = NOTHING_SAID
) -> DispatchPlan:
    """Measure the load, agree on K, plan. A collective: every rank calls it, with or without tokens.

    Args:
        statement: What this rank says of its call; compared with the others' in the same transfer.

    Raises:
        RuleError: on every rank: any rank's call breaks a rule, the ranks disagree on a knob or shape, the experts do
            not divide among the ranks, a token of any rank picked an expert that does not exist, or ranks recompute
            different layers.
    """
    device, experts, most = routing.ids_NK.device, routing.experts, launch.max_chunks
    header_3 = torch.full((3,), routing.tokens, dtype=torch.int64, device=device)
    header_3[1], header_3[2] = size_code(experts, most), -size_code(experts, most)
    ranks.all_reduce(header_3, "max")
    agree_on_sizes(header_3, experts, most)
    if experts % ranks.size:
        raise RuleError(
            rule="the number of experts is a multiple of the ranks that share them",
            value=(experts, ranks.size),
            remedy="Choose expert_degree among the divisors of the expert count.",
        )
    tokens_max = header_3[:1]
    # K stays on the device until the one transfer below: rounding up by floor division of the negative.
    chunks_1 = (-(-tokens_max // launch.chunk_tokens)).clamp_(1, most)
    order, counts = _count(routing, chunks_1, most)
    counts[-3] = statement.packed(launch)
    counts[-2] = _number_of.get(routing) or -next(_numbers)
    counts[-1:] = tokens_max
    gathered = ranks.all_gather(counts).to("cpu")
    unknown, statements, numbers, largest = gathered[:, -_HEADER:].t().tolist()
    compare(statements, statement, ranks.rank)
    if any(unknown):
        raise RuleError(
            rule="every picked expert lies in [0, experts)",
            value=f"experts={experts}, ids outside of it by rank: {unknown}",
            remedy="Route by scores that have one column per expert of the layer.",
        )
    chunks = launch.chunks(max(largest))
    counts_PCE = gathered[:, :-_HEADER].view(ranks.size, most, experts)[:, :chunks]
    number = _number_of[routing] = _agreed(numbers)
    return plan_from_counts(counts_PCE, order, routing, ranks.rank, launch, number=number)


def _agreed(numbers: list[int]) -> int:
    said = [n for n in numbers if n != _UNSAID]
    if all(n < 0 for n in said):  # planned for the first time
        return -said[0]
    if len(set(said)) > 1:
        raise RuleError(
            rule="all ranks of the expert group run the same layer at the same time",
            value=f"number of the recorded routing by rank: {said}",
            remedy="Call backward (and with it recompute) of the layers in one order on all ranks.",
        )
    return said[0]


def check_same_call(plan: DispatchPlan, ranks: Ranks) -> None:
    """Fail, on every rank, if a peer has entered the backward pass of another layer. A collective, no host sync.

    Without it rows of two layers with equal splits would mix in silence, and unequal splits would hang. On a GPU
    the failure is a device-side assertion.
    """
    numbers = ranks.all_gather(plan.slot_ends_CS.new_full((1,), plan.number, dtype=torch.int64))
    torch._assert_async(
        (numbers == plan.number).all(),
        "backward of PipelinedLLEP layers must run in one order on all ranks: a peer is in another layer",
    )


def _count(routing: Routing, chunks_1: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Route numbers sorted by (chunk, expert), and ``[most·E + 4]``: routes by (chunk, expert), then how many ids
    name no expert, then three elements to fill in (statement, number of the record, largest token count)."""
    device, experts = routing.ids_NK.device, routing.experts
    known_NK = routing.ids_NK.clamp(0, experts - 1)
    chunk_N = torch.arange(routing.tokens, device=device) % chunks_1
    keys = (known_NK + (chunk_N * experts).unsqueeze(1)).flatten()
    counts = torch.zeros(most * experts + _HEADER, dtype=torch.int64, device=device)
    counts.scatter_add_(0, keys, torch.ones_like(keys))
    counts[-_HEADER] = (known_NK != routing.ids_NK).sum()
    return torch.sort(keys.to(torch.int32), stable=True).indices, counts


def gathered_counts(routings: Sequence[Routing], launch: DispatchLaunch) -> Tensor:
    """What ranks with these routings bring to :func:`make_plan`'s gather.

    One routing per rank, in rank order; for ``LoopbackRanks(gathered=[…], largest=longest rank's tokens)``.
    """
    tokens_max = max(r.tokens for r in routings)
    rows = []
    for routing in routings:
        chunks_1 = torch.tensor([launch.chunks(tokens_max)], device=routing.ids_NK.device)
        counts = _count(routing, chunks_1, launch.max_chunks)[1]
        counts[-1] = tokens_max
        rows.append(counts)
    return torch.stack(rows)


def plan_from_counts(
    counts_PCE: Tensor,
    order: Tensor,
    routing: Routing,
    rank: int,
    launch: DispatchLaunch,
    *,
    number: int = 1,
) -> DispatchPlan:
    """The plan of ``rank`` from everybody's counts.

    Args:
        counts_PCE: int64 on the CPU, routes of every rank by chunk and expert.
        order: ``[N·K]`` this rank's route numbers sorted by (chunk, expert, route), on the layer's device.
        number: What all ranks call this planning.
    """
    ranks, chunks, experts = counts_PCE.shape
    local = experts // ranks
    least = plan_least_loaded(
        counts_PCE.sum((0, 1)).tolist(),
        ranks,
        alpha=launch.alpha,
        min_rows=launch.min_rows,
        switch=launch.lambda_ if launch.migrate else float("inf"),
    )
    guests = [least.guests(r) for r in range(ranks)]
    slots = [(*range(r * local, (r + 1) * local), *guests[r]) for r in range(ranks)]
    pieces = [(e, *piece) for e, cut in enumerate(least.intervals) for piece in cut]
    expert_B = [piece[0] for piece in pieces]
    take_PCB = _shares(counts_PCE, pieces) if least.spread else counts_PCE[:, :, expert_B]

    slot_of = [{e: s for s, e in enumerate(row)} for row in slots]
    by_destination = sorted(
        range(len(pieces)), key=lambda b: (pieces[b][1], slot_of[pieces[b][1]][expert_B[b]], pieces[b][2])
    )
    own_CB = take_PCB[rank]  # pieces in expert order: how `order` lies
    starts_CB = _exclusive_sum(own_CB)
    to = torch.tensor(by_destination, dtype=torch.int64)
    destination_B = torch.tensor([pieces[b][1] for b in by_destination], dtype=torch.int64)
    send_CP = torch.zeros(chunks, ranks, dtype=torch.int64).index_add_(1, destination_B, own_CB[:, to])

    mine = [b for b in by_destination if pieces[b][1] == rank]
    slot_B = torch.tensor([slot_of[rank][expert_B[b]] for b in mine], dtype=torch.int64)
    arrive_CPB = take_PCB[:, :, mine].transpose(0, 1).contiguous()
    slot_rows_CS = torch.zeros(chunks, len(slots[rank]), dtype=torch.int64)
    slot_rows_CS.index_add_(1, slot_B, arrive_CPB.sum(1))

    routes, received = routing.tokens * routing.top_k, int(arrive_CPB.sum())
    within_CPB = _from_chunk_start(arrive_CPB)
    sorted_CBP = arrive_CPB.transpose(1, 2).contiguous()
    sorted_within_CBP = _from_chunk_start(sorted_CBP)
    scalar_start_PCB = _exclusive_sum(arrive_CPB.transpose(0, 1).contiguous())
    # Per-layer scalars travel by destination first, chunk by chunk within it.
    layer_key_CB = destination_B.unsqueeze(0) * chunks + torch.arange(chunks).unsqueeze(1)
    layer = torch.sort(layer_key_CB.flatten(), stable=True).indices
    starts, lengths = starts_CB[:, to].flatten(), own_CB[:, to].flatten()
    sent_C = send_CP.sum(1)
    slot_ends, (send, place, into_layer, sort, back, scalars) = _segments(
        torch.cumsum(slot_rows_CS, 1),
        [
            (starts, lengths, routes),
            (torch.zeros_like(sent_C), sent_C, routes),
            (starts[layer], lengths[layer], routes),
            (within_CPB.transpose(1, 2).flatten(), sorted_CBP.flatten(), received),
            (sorted_within_CBP.transpose(1, 2).flatten(), arrive_CPB.flatten(), received),
            (scalar_start_PCB.permute(1, 2, 0).flatten(), sorted_CBP.flatten(), received),
        ],
        order.device,
    )
    # The six lists share one storage: what follows from a list takes its place.
    sent_routes = order[send]
    torch.div(sent_routes, routing.top_k, rounding_mode="floor", out=send)
    place.copy_(torch.empty_like(place).scatter_(0, sent_routes, place))
    into_layer.copy_(order[into_layer])
    return DispatchPlan(
        chunks=chunks,
        tokens=routing.tokens,
        top_k=routing.top_k,
        experts=experts,
        ranks=ranks,
        rank=rank,
        number=number,
        least_loaded=least,
        slots=slots[rank],
        send_splits=_tuples(send_CP),
        receive_splits=_tuples(arrive_CPB.sum(2)),
        slot_rows=_tuples(slot_rows_CS),
        migration=_migration(guests, rank, local),
        slot_ends_CS=slot_ends,
        send_rows=send,
        positions_NK=place.view(routing.tokens, routing.top_k),
        sort_index=sort,
        back_index=back,
        route_order=into_layer,
        scalar_index=scalars,
    )


def _shares(counts_PCE: Tensor, pieces: list[tuple[int, int, int, int]]) -> Tensor:
    """Rows of every rank, chunk and piece: ``[P, C, B]``, pieces in expert order."""
    expert_B, _, _, end_B = torch.tensor(pieces, dtype=torch.int64).view(-1, 4).unbind(1)
    counts_PCB = counts_PCE[:, :, expert_B]
    have_PB = counts_PCB.sum(1)
    before_PB = torch.cumsum(have_PB, 0) - have_PB
    upto_PB = torch.minimum((end_B - before_PB).clamp_(min=0), have_PB)
    prefix_PCB = counts_PCB * (upto_PB == have_PB).unsqueeze(1)
    p, b = torch.nonzero((upto_PB > 0) & (upto_PB < have_PB), as_tuple=True)
    if p.numel():
        prefix_PCB[p, :, b] = _by_turns(counts_PCB[p, :, b], upto_PB[p, b])
    shares = prefix_PCB.clone()
    same = (expert_B[1:] == expert_B[:-1]).to(torch.int64)
    shares[:, :, 1:] -= prefix_PCB[:, :, :-1] * same
    return shares


def _by_turns(counts_XC: Tensor, rows_X: Tensor) -> Tensor:
    """How many of the first ``rows`` fall to each chunk when the chunks take turns; ``rows`` < their sum."""
    chunks = counts_XC.shape[1]
    rising = torch.sort(counts_XC, dim=1).values
    # Rows placed once every chunk has been raised to the level of the j-th smallest.
    placed = torch.cumsum(rising, 1) + rising * (chunks - 1 - torch.arange(chunks))
    full_X = (placed <= rows_X.unsqueeze(1)).sum(1)
    pad = torch.zeros(counts_XC.shape[0], 1, dtype=torch.int64)
    at = full_X.unsqueeze(1)
    level_X1 = torch.cat([pad, rising], 1).gather(1, at)
    left_X1 = rows_X.unsqueeze(1) - torch.cat([pad, placed], 1).gather(1, at)
    level_X1 = level_X1 + left_X1 // (chunks - at)
    longer = (counts_XC > level_X1).to(torch.int64)
    extra = longer * (torch.cumsum(longer, 1) <= left_X1 % (chunks - at))
    return torch.minimum(counts_XC, level_X1) + extra


def _segments(
    beside: Tensor, tables: list[tuple[Tensor, Tensor, int]], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Expand runs ``start, start + 1, … (length)`` into int32 index tensors of one storage; ``beside`` goes along.

    One upload and one expansion for all: small layers wait for the host, not for the device.
    """
    lengths = torch.cat([t for _, t, _ in tables])
    # Element g of a run that starts `start` and lies behind `s` others is start + (g - s).
    shift = torch.cat([t for t, _, _ in tables]).sub_(_exclusive_sum(lengths))
    host = torch.cat([beside.flatten(), shift, lengths]).to(torch.int32)
    here, shift, lengths = _upload(host, device).split([beside.numel(), shift.numel(), lengths.numel()])
    totals = [n for _, _, n in tables]
    index = torch.repeat_interleave(shift, lengths, output_size=sum(totals))
    index += torch.arange(sum(totals), device=device, dtype=torch.int32)
    return here.view(beside.shape), list(index.split(totals))


def _upload(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def _migration(guests: list[tuple[int, ...]], rank: int, local: int) -> Migration | None:
    if not any(guests):
        return None
    sends = tuple(tuple(e - rank * local for e in row if e // local == rank) for row in guests)
    owners = [e // local for e in guests[rank]]
    return Migration(sends, tuple(owners.count(r) for r in range(len(guests))))


def _exclusive_sum(x: Tensor) -> Tensor:
    """Running sum over all elements in memory order, each without itself; same shape."""
    flat = x.flatten()
    return (torch.cumsum(flat, 0) - flat).view(x.shape)


def _from_chunk_start(x_CAB: Tensor) -> Tensor:
    """The same within every chunk."""
    flat = x_CAB.flatten(1)
    return (torch.cumsum(flat, 1) - flat).view(x_CAB.shape)


def _ranges(lengths: list[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
    out, start = [], 0
    for n in lengths:
        out.append(slice(start, start + n))
        start += n
    return out


def _tuples(table: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())
