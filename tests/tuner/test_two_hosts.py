"""A sweep over two hosts: network namespaces of this machine, a Ray node in each, a link of 100 Mbit/s between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.netns import Hosts, namespaces, pids_in, rate_of, remove_stale, why_not
from cost_model.errors import RuleError
from db.repositories import SampleRepository
from db.session import Database
from tests.tuner.two_hosts_run import NETWORK
from tuner.machine.fingerprint import local_hardware_id

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no hosts here: {why_not()}")

RATE = "100mbit"


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(RATE) as found:
        yield found
    assert not any(name in namespaces() for name in found.names)
    assert not found.folder.exists()


def test_rows_over_two_hosts_have_a_fingerprint_of_their_own(hosts: Hosts, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/rows.db"
    done = hosts.run([sys.executable, "-m", "tests.tuner.two_hosts_run", url, hosts.address], timeout_s=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["two"], said["one"]) == ("succeeded", "succeeded")
    assert "runs only there" in said["elsewhere"]
    assert said["bound"].startswith("queued")  # left for nodes that are as it asks
    database = Database(url)
    with database.reading() as session:
        rows = SampleRepository(session).frame()
    database.close()
    spread = rows["shape_json"].map(lambda text: json.loads(text).get("nodes", 1))
    over_two, alone = rows[spread == 2], rows[spread == 1]
    assert set(over_two["hardware_id"]) == {local_hardware_id("cpu", NETWORK)}
    assert set(alone["hardware_id"]) == {local_hardware_id("cpu")}
    assert set(over_two["rank"]) == {0, 1}
    (software,) = set(over_two["software_json"])
    assert json.loads(software)["network"] == NETWORK == hosts.network


def test_bytes_between_hosts_travel_at_the_rate(hosts: Hosts) -> None:
    """Twice a megabyte at 100 Mbit/s cannot take less than 0.16 s: the link is real."""
    program = (
        "import socket, sys, time\n"
        "server = socket.create_server((sys.argv[1], 7001)); peer, _ = server.accept(); n = 0\n"
        "begun = time.monotonic()\n"
        "while data := peer.recv(1 << 20): n += len(data)\n"
        "print(n, time.monotonic() - begun)"
    )
    client = (
        "import socket, sys, time\n"
        "for _ in range(200):\n"
        "    try: link = socket.create_connection((sys.argv[1], 7001)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "link.sendall(bytes(2_000_000)); link.close()"
    )
    inside = ["ip", "netns", "exec", hosts.names[0], sys.executable, "-c", program, hosts.addresses[0]]
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as listening:
        hosts.run([sys.executable, "-c", client, hosts.addresses[0]], host=1, timeout_s=60)
        said, _ = listening.communicate(timeout=60)
    nbytes, seconds = said.split()
    assert int(nbytes) == 2_000_000
    assert float(seconds) > 0.9 * (2_000_000 - 2 * 2**16) * 8 / rate_of(RATE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_hosts_of_an_owner_that_was_ended_are_gone(number: signal.Signals) -> None:
    program = (
        "import subprocess, sys, time\n"
        "from benchmarks.netns import Hosts\n"
        "with Hosts('1gbit', ray=False) as hosts:\n"
        "    subprocess.Popen(['ip', 'netns', 'exec', hosts.names[1], 'sleep', '600'])\n"
        "    print(hosts.folder, *hosts.names, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder, *names = owner.stdout.readline().split()
        assert set(names) <= set(namespaces())
        running = [psutil.Process(pid) for name in names for pid in pids_in(name)]
        owner.send_signal(number)
        owner.wait(timeout=30)
    if number is signal.SIGKILL:
        assert set(names) <= set(remove_stale())
    _, alive = psutil.wait_procs(running, timeout=10)
    assert running
    assert not Path(folder).exists()
    assert alive == []
    assert not set(names) & set(namespaces())


def test_a_rate_is_a_number_with_its_unit() -> None:
    assert (rate_of("100mbit"), rate_of("2gbit")) == (1e8, 2e9)
    for wrong in ("fast", "0mbit", "1 gbit", "-1gbit"):
        with pytest.raises(RuleError, match="a rate is"):
            Hosts(wrong)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuleError, match="only root"), Hosts(RATE):
        time.sleep(0)
