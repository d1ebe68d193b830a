"""Relays hold what ranks send and change nothing of it, and every pass pays for that alike."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import measure_link_delay as script

DELAY = 0.002


def test_what_is_sent_arrives_later_whole_and_in_order_and_so_does_the_answer() -> None:
    with socket.create_server((script.LOCAL, 0)) as rank:
        relays = script.Relays([rank.getsockname()[1]], DELAY)
        with socket.create_connection((script.LOCAL, relays.places[0])) as other:
            rank.settimeout(30)
            called, _ = rank.accept()
            with called:
                sent = bytes(range(256)) * 1000
                for place in range(0, len(sent), 9999):
                    other.sendall(sent[place : place + 9999])
                with called.makefile("rb") as stream:
                    assert stream.read(len(sent)) == sent
                called.sendall(b"answer")
                assert other.recv(6, socket.MSG_WAITALL) == b"answer"
        relays.stop()
    assert relays.held and min(relays.held) >= DELAY


def test_ranks_listen_themselves_and_call_their_neighbors_through_relays() -> None:
    ports = script.free_ports(3)
    relays = script.Relays(ports, 0.0)
    with script.hostfiles(relays, ports) as files:
        told = [json.loads(file.read_text()) for file in files]
    for rank, hosts in enumerate(told):
        heard = [int(address.rpartition(":")[2]) for [address] in hosts]
        right = (rank + 1) % 3
        assert heard[rank] == ports[rank] and heard[right] == relays.places[right]


def test_a_pass_and_a_plain_step_pay_the_same() -> None:
    plain, drafted = script.Rounds(0.01, 1.0, 0.0), script.Rounds(0.03, 2.5, 0.0)
    slow = [script.predicted(0.01, alone, 0.05) for alone in (plain, drafted)]
    assert [each.seconds for each in slow] == pytest.approx([0.06, 0.08])
    assert script.speedup(*slow) == pytest.approx(2.5 * 0.06 / 0.08)
    assert script.compared(slow[1], slow[1])["off"] == 0
