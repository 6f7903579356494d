"""What would fit when a case does not: the longest context here, the fewest nodes for this context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cost_model.memory import MemoryReport
from cost_model.presets import PRESET_NAMES, preset
from cost_model.workload import Workload
from tuner.planning.layouts import batches, sequence_degrees
from tuner.planning.search import Problem, anything_fits

MAX_NODES = 4096
_STEPS = 8
"""The longest context is found to one part in this many."""
GIB = 2.0**30


def workload_for(problem: Problem, context: int) -> Workload:
    """The same work at another context: as many tokens an update as before, in whole rounds of sequences."""
    world = problem.cluster.world_size
    groups = world // max(sequence_degrees(problem.model, world))
    sequences = max(groups, problem.workload.global_batch_tokens // context // groups * groups)
    return replace(problem.workload, context_tokens=context, global_batch_tokens=context * sequences)


def _fits(problem: Problem) -> bool:
    return anything_fits(problem) is not None


def longest_context(problem: Problem) -> dict[str, Any] | None:
    """The longest context up to the asked one that fits on this cluster, to one eighth; None when none does."""
    world = problem.cluster.world_size
    unit = max(sequence_degrees(problem.model, world))
    free = replace(problem, fixed=_unpinned(problem))

    def at(context: int) -> Problem:
        return replace(free, workload=workload_for(free, context))

    if not _fits(at(unit)):
        return None
    high = problem.workload.context_tokens
    low = high // 2 // unit * unit
    while low >= unit and not _fits(at(low)):
        high, low = low, low // 2 // unit * unit
    if low < unit:
        return None
    step = max(unit, (high - low) // _STEPS // unit * unit)
    while high - low > step:
        middle = (low + (high - low) // 2) // step * step
        if middle <= low:
            break
        if _fits(at(middle)):
            low = middle
        else:
            high = middle
    workload = workload_for(free, low)
    return {
        "context_tokens": low,
        "global_batch_tokens": workload.global_batch_tokens,
        "nodes": problem.cluster.nodes,
        "gpus": world,
    }


def _unpinned(problem: Problem) -> dict[str, Any]:
    """Pins that still mean something at another size."""
    sized = {"max_tokens_per_rank", "accumulation_steps", "chunk_tokens", "strip_rows", "host_budget_bytes"}
    return {key: value for key, value in problem.fixed.items() if key not in sized}


def _with_nodes(problem: Problem, nodes: int) -> Problem | None:
    """The case on ``nodes`` nodes, its batch raised where more ranks than sequences would idle."""
    cluster = replace(problem.cluster, nodes=nodes)
    degrees = ("sequence_degree", "expert_degree", "vocab_degree")
    fixed = {key: value for key, value in _unpinned(problem).items() if key not in degrees}
    bigger = replace(problem, cluster=cluster, fixed=fixed)
    if next(batches(bigger.model, cluster, bigger.workload, bigger.fixed), None) is not None:
        return bigger
    workload = workload_for(bigger, problem.workload.context_tokens)
    if workload.global_batch_tokens < problem.workload.global_batch_tokens:
        return None
    raised = replace(bigger, workload=workload)
    return raised if next(batches(raised.model, cluster, workload, fixed), None) is not None else None


def fewest_nodes(problem: Problem) -> dict[str, Any] | None:
    """The fewest nodes of this kind on which the asked context fits; None when none up to MAX_NODES do."""
    nodes, failed = max(2, problem.cluster.nodes), problem.cluster.nodes
    found: Problem | None = None
    while nodes <= MAX_NODES:
        candidate = _with_nodes(problem, nodes)
        if candidate is not None and _fits(candidate):
            found = candidate
            break
        failed, nodes = nodes, nodes * 2
    if found is None:
        return None
    # Between the last power of two that failed and this one; odd counts are often no legal layout.
    step = max(1, (nodes - failed) // _STEPS)
    for fewer in range(failed + step, nodes, step):
        candidate = _with_nodes(problem, fewer)
        if candidate is not None and _fits(candidate):
            found, nodes = candidate, fewer
            break
    return {
        "nodes": nodes,
        "gpus": nodes * problem.cluster.gpus_per_node,
        "context_tokens": found.workload.context_tokens,
        "global_batch_tokens": found.workload.global_batch_tokens,
    }


def reason(report: MemoryReport) -> str:
    """Why the launch nearest to fitting does not: the live set, its largest part, and the limit it breaks."""
    parts: list[str] = []
    if report.footprint_bytes > 0.95 * report.hbm_bytes:
        name, nbytes = report.binding_phases[0]
        term, size = max(report.phases[name].items(), key=lambda item: item[1])
        parts.append(
            f"{name} holds {nbytes / GIB:.1f} GiB of which {term} is {size / GIB:.1f}; with what lies outside the"
            f" allocator and its slack {report.footprint_bytes / GIB:.1f} GiB stand against"
            f" {report.hbm_bytes / GIB:.1f} GiB of device memory"
        )
    if report.host_bytes_per_node > report.host_limit_bytes:
        term, size = max(report.host_terms.items(), key=lambda item: item[1])
        parts.append(
            f"a node's host memory would hold {report.host_bytes_per_node / GIB:.1f} GiB, of which {term} is"
            f" {size / GIB:.1f}, against a limit of {report.host_limit_bytes / GIB:.1f}"
        )
    return "; ".join(parts) or "the launch is within its limits"


def memory_needed(report: MemoryReport) -> dict[str, int]:
    """Device memory of a card and memory of a node with which the launch at hand would fit as it is."""
    return {
        "hbm_bytes": -(-report.footprint_bytes * 100 // 95),
        "ram_bytes_per_node": -(-report.host_bytes_per_node * 10 // 9),
    }


def named_cluster(problem: Problem) -> dict[str, Any] | None:
    """The smallest named cluster, by GPUs, on which the case fits as it is."""
    free = replace(problem, fixed={})
    for nodes in (1, 2, 4, 8, 16, 32):
        for name in PRESET_NAMES:
            cluster = preset(name, nodes)
            candidate = _with_nodes(replace(free, cluster=cluster), nodes)
            if candidate is not None and _fits(candidate):
                return {
                    "name": name,
                    "nodes": nodes,
                    "gpus": cluster.world_size,
                    "global_batch_tokens": candidate.workload.global_batch_tokens,
                }
    return None


def what_would_fit(problem: Problem, report: MemoryReport) -> dict[str, Any]:
    """Both remedies, searched, with the reason; a remedy that does not exist is null and said so."""
    context = longest_context(problem)
    nodes = fewest_nodes(problem)
    notes: list[str] = []
    if context is None:
        notes.append(
            "no context fits on this cluster: what is independent of the context is already too much"
        )
    if nodes is None:
        notes.append(f"no number of such nodes up to {MAX_NODES} fits this context")
    elif nodes["global_batch_tokens"] != problem.workload.global_batch_tokens:
        notes.append("on that many nodes the global batch has to be larger, or ranks would have no sequence")
    return {
        "reason": reason(report),
        "longest_context": context,
        "fewest_nodes": nodes,
        "named_cluster": named_cluster(problem) if nodes is None else None,
        "memory_needed": memory_needed(report),
        "notes": notes,
    }
