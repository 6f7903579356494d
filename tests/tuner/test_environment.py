"""What surrounds a measurement: read from the driver's text, and flagged where it casts doubt on the times."""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Any

import pytest

from db.repositories import TrialRepository
from db.session import Database
from operators.ranks import Ranks
from tests.gang import gang
from tests.tuner.conftest import ToySpec
from tuner.executors.local import LocalExecutor
from tuner.machine.card_state import card_id, parse_cards, parse_processes
from tuner.measuring.environment import HOST_SHARE, OUTSIDE_BYTES, Watch, environment_of, strangers_of
from tuner.sweeping.sweep import create_sweep, run_sweep

GIB = 2**30
FIRST, SECOND = "GPU-0c0ffee0-0000-1111-2222-333344445555", "GPU-0badcafe-0000-1111-2222-333344445555"
# the columns that tuner.machine.card_state asks for, as a driver prints them with csv,noheader,nounits
CARDS = f"""\
0, {FIRST}, 1755, 3201, 1980, 612.41, 700.00, 700.00, 54, 0, 2048, 143771, 0x0000000000000004
1, {SECOND}, 345, 3201, 1980, 118.03, 500.00, 700.00, 88, 97, 81920, 143771, 0x0000000000000068
"""
PROCESSES = f"""\
{FIRST}, 4242, 1536
{SECOND}, 4243, 1536
{SECOND}, 977, 79000
"""


def test_states_of_cards_are_read_in_base_units() -> None:
    first, second = parse_cards(CARDS)
    assert (first.index, first.uuid) == (0, card_id(FIRST))
    assert (first.sm_clock_hz, first.memory_clock_hz, first.max_sm_clock_hz) == (1.755e9, 3.201e9, 1.98e9)
    assert (first.power_w, first.power_limit_w, first.temperature_c) == (612.41, 700.0, 54.0)
    assert (first.busy_share, first.used_bytes) == (0.0, 2 * GIB)
    assert first.slowed_by == ("power_cap",)
    assert second.slowed_by == ("hardware_slowdown", "thermal_slowdown", "hardware_thermal_slowdown")


def test_what_a_driver_does_not_know_is_none_and_other_lines_are_left_out() -> None:
    text = (
        'Field "clocks_event_reasons.active" is not a valid field to query.\n'
        f"3, {FIRST}, [N/A], [Not Supported], N/A, [N/A], [N/A], [N/A], 30, [N/A], [N/A], 143771, [N/A]\n"
        "\n1, too, short\n"
    )
    (card,) = parse_cards(text)
    assert (card.sm_clock_hz, card.busy_share, card.used_bytes, card.slowed_by) == (None, None, None, ())
    assert card.temperature_c == 30.0
    assert parse_cards("NVIDIA-SMI has failed because it couldn't communicate with the driver.") == []


def test_processes_are_read_also_without_their_memory() -> None:
    assert [one.pid for one in parse_processes(PROCESSES)] == [4242, 4243, 977]
    (hidden,) = parse_processes(f"{FIRST}, 12, [N/A]\n[Insufficient Permissions]\n")
    assert (hidden.uuid, hidden.pid, hidden.used_bytes) == (card_id(FIRST), 12, None)


# -- flags ---------------------------------------------------------------------------------------------


def answers(
    *,
    cards: str = CARDS.replace("500.00", "700.00").replace("97", "0").replace("68", "04"),
    before: str | None = None,
    processes: str = PROCESSES.replace(f"{SECOND}, 977, 79000\n", ""),
    busy_core_s: float = 20.0,
    used: int = 100 * GIB,
    after_own_work: bool = False,
) -> list[dict[str, Any]]:
    """Two ranks on a card each, busy for 10 of 10 seconds, on a node of 16 cores."""
    node = {
        "host": "n1",
        "seconds": 10.0,
        "cores": 16,
        "busy_core_s": busy_core_s,
        "load_1m": 2.0,
        "cpu_clock_hz": None,
        "cpu_governor": None,
        "family": [4242, 4000, 1],
        "after_own_work": after_own_work,
        "cards_before": [asdict(card) for card in parse_cards(cards if before is None else before)],
        "cards_after": [asdict(card) for card in parse_cards(cards)],
        "processes": [asdict(one) for one in parse_processes(processes)],
    }
    return [
        {
            "device_used_bytes": used,
            "watch": {
                "pid": 4242 + rank,
                "card": card_id(uuid),
                "cpu_s": 10.0,
                "device_reserved_bytes": 98 * GIB,
                "node": node if rank == 0 else None,
            },
        }
        for rank, uuid in enumerate((FIRST, SECOND))
    ]


def flags(**changes: Any) -> list[str]:
    return [flag.flag for flag in environment_of(answers(**changes))[1]]


def test_a_gang_alone_on_its_node_is_not_flagged_and_its_cards_are_kept() -> None:
    nodes, found = environment_of(answers())
    assert found == []
    (node,) = nodes
    assert node["others_cpu_share"] == 0.0
    assert [card["after"]["sm_clock_hz"] for card in node["cards"]] == [1.755e9, 0.345e9]
    assert all(card["before"] is not None for card in node["cards"])


def test_a_stranger_on_a_card_is_named() -> None:
    _, (flag,) = environment_of(answers(processes=PROCESSES))
    assert (flag.flag, flag.host) == ("shared_card", "n1")
    assert flag.detail == "card 1: 1 other process (977), 77.1 GiB"


def test_strangers_are_told_from_the_gang_and_from_those_who_started_it() -> None:
    there = parse_processes(f"{FIRST}, 4242, 900\n{FIRST}, 4000, 100\n{FIRST}, 7, 2048\n")
    strangers, known = strangers_of(there, {4242, 4000}, ranks=1)
    assert ([one.pid for one in strangers], known) == ([7], True)
    strangers, known = strangers_of(there, {1, 2}, ranks=2)
    assert ([one.pid for one in strangers], known) == ([7], False)
    assert strangers_of([], {1}, ranks=1) == ([], False)


def test_in_a_container_more_processes_than_ranks_give_a_stranger_away() -> None:
    elsewhere = f"{FIRST}, 70001, 900\n{SECOND}, 70002, 900\n"
    assert flags(processes=elsewhere) == []
    assert flags(processes=elsewhere + f"{SECOND}, 70003, 900\n") == ["shared_card"]


def test_where_no_process_is_shown_memory_beyond_the_gangs_gives_one_away() -> None:
    assert flags(processes="") == []
    assert flags(processes="", used=98 * GIB + OUTSIDE_BYTES + 1) == ["card_memory", "card_memory"]
    assert flags(used=98 * GIB + OUTSIDE_BYTES + 1) == []


def test_a_card_that_was_busy_before_is_flagged_unless_by_the_gang_itself() -> None:
    busy = CARDS.replace("54, 0,", "54, 60,")
    assert flags(before=busy)[0] == "busy_card"
    assert "busy_card" not in flags(before=busy, after_own_work=True)


def test_clocks_that_were_held_down_are_flagged() -> None:
    found = environment_of(answers(cards=CARDS.replace("97", "0")))[1]
    assert [(flag.flag, flag.detail) for flag in found] == [
        ("slowed_down", "card 1: hardware_slowdown, thermal_slowdown, hardware_thermal_slowdown"),
        ("power_limited", "card 1: 500 W, by default 700 W"),
    ]


@pytest.mark.parametrize(
    ("busy", "expected"), [(20.0, []), (59.0, []), (61.0, ["busy_host"]), (159.0, ["busy_host"])]
)
def test_others_on_the_cores_flag_the_host(busy: float, expected: list[str]) -> None:
    assert flags(busy_core_s=busy) == expected
    (node,) = environment_of(answers(busy_core_s=busy))[0]
    assert node["others_cpu_share"] == pytest.approx((busy - 20.0) / 160.0)


def test_every_node_is_judged_by_its_own_ranks() -> None:
    nodes, found = environment_of([*answers(), *answers(busy_core_s=160.0)])
    assert [node["others_cpu_share"] > 0.5 for node in nodes] == [False, True]
    assert [flag.flag for flag in found] == ["busy_host"]


# -- a real gang ---------------------------------------------------------------------------------------


def _watched(ranks: Ranks) -> dict[str, Any]:
    watch = Watch("cpu")
    total = sum(number * number for number in range(300_000))
    ranks.barrier()
    return watch.answer() | {"total": total}


def test_a_rank_counts_its_own_time_within_the_machines() -> None:
    for one in gang(2).run(_watched):
        node = one["node"]
        assert one["pid"] in node["family"]
        assert len(node["family"]) > 1
        assert 0 < one["cpu_s"] <= node["seconds"] * node["cores"] + 0.05
        # hundredths of a second on every core are not counted yet
        assert node["busy_core_s"] >= 0.0
        assert node["cards_after"] == []


def test_a_trial_keeps_what_surrounded_it(
    database: Database, executor: LocalExecutor, toy_spec: ToySpec
) -> None:
    sweep_id = create_sweep(database, toy_spec([1, 2], ["ok"]))
    run_sweep(database, sweep_id, executor)
    with database.reading() as session:
        results = [trial.result_json or {} for trial in TrialRepository(session).of_sweep(sweep_id)]
    assert len(results) == 2
    for result in results:
        (node,) = result["environment"]
        assert node["host"] == socket.gethostname()
        assert 0.0 <= node["others_cpu_share"] <= 1.0
        assert node["seconds"] > 0.0
        # the machine of the tests may be anybody's: only what its share says is asked for
        assert {flag["flag"] for flag in result["flags"]} <= {"busy_host"}
        assert not result["flags"] or node["others_cpu_share"] > HOST_SHARE
