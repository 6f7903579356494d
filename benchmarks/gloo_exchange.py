"""Exchanges between two hosts over gloo: ours, whose receives are posted first, beside gloo's own and send-first.

    python -m benchmarks.gloo_exchange                 # as root, iproute2; two namespaces at three rates
    python -m benchmarks.gloo_exchange --rates 1gbit --bytes 5242880

Every exchange moves ``--bytes`` each way at once, so the link's limit is one direction's time. The ways take turns
within a run. Rows go to ``benchmarks/results/two-hosts/exchanges.csv``: medians, and the 90th percentile, of the slower
rank's times over ``--repeats`` exchanges.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

import torch
import torch.distributed as dist

from benchmarks.netns import Hosts, rate_of
from benchmarks.two_hosts import RATES
from operators.ranks import ProcessRanks
from tuner.machine.fingerprint import commit, local_hardware_id

FILE = Path(__file__).parent / "results" / "two-hosts" / "exchanges.csv"
COLUMNS = ("rate", "bytes", "way", "median_s", "p90_s", "over_link", "repeats", "hardware_id", "commit")
_PORT = 29611


def ways(ranks: ProcessRanks, nbytes: int) -> dict[str, Callable[[], object]]:
    """Every way to exchange ``nbytes`` with the one other rank."""
    other = 1 - ranks.rank
    out, into = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    both = [torch.empty_like(out), torch.empty_like(out)]
    splits = [nbytes, 0] if ranks.rank else [0, nbytes]

    def send_first() -> None:
        works = [dist.isend(out, other), dist.irecv(into, other)]
        for work in works:
            assert work is not None
            work.wait()

    return {
        "ours: ring hop": lambda: ranks.shift(out, into).wait(),
        "ours: all-to-all": lambda: ranks.all_to_all(into, out, splits, splits).wait(),
        "ours: all-gather": lambda: ranks.all_gather(out),
        "send, then receive": send_first,
        "gloo: all_to_all_single": lambda: dist.all_to_all_single(into, out, splits, splits),
        "gloo: all_gather": lambda: dist.all_gather(both, out),
    }


def exchange(rank: int, address: str, nbytes: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of every exchange, on this rank, by way."""
    os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(_PORT), GLOO_SOCKET_IFNAME="eth0")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = ProcessRanks()
    found: dict[str, list[float]] = {}
    for _ in range(repeats + 1):
        for name, way in ways(ranks, nbytes).items():
            ranks.barrier()
            began = time.perf_counter()
            way()
            found.setdefault(name, []).append(time.perf_counter() - began)
    dist.destroy_process_group()
    return {name: times[1:] for name, times in found.items()}


def measure(rate: str, nbytes: int, repeats: int) -> list[dict[str, str | float]]:
    """One row a way: of every exchange the time of the slower rank."""
    with Hosts(rate, ray=False) as hosts, ThreadPoolExecutor(2) as pool:

        def run(rank: int) -> dict[str, list[float]]:
            command = [sys.executable, "-m", "benchmarks.gloo_exchange", "--rank", str(rank)]
            command += ["--address", hosts.addresses[0], "--bytes", str(nbytes), "--repeats", str(repeats)]
            done = hosts.run(command, host=rank)
            if done.returncode:
                raise SystemExit(f"rank {rank} ended with {done.returncode}: {done.stderr[-2000:]}")
            found: dict[str, list[float]] = json.loads(done.stdout)
            return found

        answers = list(pool.map(run, (0, 1)))
    limit = nbytes * 8 / rate_of(rate)
    rows: list[dict[str, str | float]] = []
    for way, times in answers[0].items():
        slower = [max(pair) for pair in zip(times, answers[1][way], strict=True)]
        rows.append(
            {
                "rate": rate, "bytes": nbytes, "way": way, "median_s": round(median(slower), 6),
                "p90_s": round(quantiles(slower, n=10)[-1], 6), "over_link": round(median(slower) / limit, 3),
                "repeats": repeats, "hardware_id": local_hardware_id("cpu", f"tbf-{rate}"), "commit": commit(),
            }
        )  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; with ``--rank`` one of its two ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--bytes", type=int, default=2**19)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.bytes < 1 or options.repeats < 2:
        parser.error("an exchange has at least 1 byte, and a median and a 90th percentile at least 2 repeats")
    if not options.out.parent.is_dir():
        parser.error(f"there is no folder {options.out.parent}")
    if options.rank is not None:
        print(json.dumps(exchange(options.rank, options.address, options.bytes, options.repeats)))
        return
    rows = [row for rate in options.rates for row in measure(rate, options.bytes, options.repeats)]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(f"{row['rate']:8} {row['way']:26} {row['median_s']:.4f} s, {row['over_link']} times the link's")


if __name__ == "__main__":
    main()
