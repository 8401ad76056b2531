"""Addresses and ports of a node, on this machine's own."""

import contextlib
import io
import socket

import pytest

from nemo_run_ray.remote.slurm import network
from nemo_run_ray.remote.slurm.network import choose_ports, head_address
from nemo_run_ray.remote.slurm.settings import CannotContinue


@pytest.mark.parametrize(
    ("kernels_first", "least"),
    [(60000, 10240), (32768, 10240), (14336, 10240), (14335, 1200), (9000, 1200), (1024, 10240)],
)
def test_no_port_is_one_that_the_kernel_gives_to_connections(monkeypatch, kernels_first, least):
    """Its range begins at 9000 on some machines; from 1024 on, any free port has to do."""
    text = f"{kernels_first}\t60999\n"
    monkeypatch.setattr(network, "open", lambda *_, **__: io.StringIO(text), raising=False)
    for salt in range(30):
        ports = choose_ports({}, True, salt)
        assert max(ports.values()) < (min(kernels_first, 32768) if kernels_first > 1024 else 32768)
        first, last = ports["MIN_WORKER_PORT"], ports["MAX_WORKER_PORT"]
        assert first >= least
        services = [port for name, port in ports.items() if "WORKER" not in name]
        assert len(set(services)) == len(services) == 9
        assert not any(first <= port <= last for port in services), "`ray start` refuses that"
        assert last - first > 900


@pytest.mark.parametrize(
    ("given", "port", "chosen", "expected"),
    [
        ("MIN_WORKER_PORT", 54001, "MAX_WORKER_PORT", 54257),
        ("MIN_WORKER_PORT", 65500, "MAX_WORKER_PORT", 65535),
        ("MAX_WORKER_PORT", 2000, "MIN_WORKER_PORT", 1744),
        ("MAX_WORKER_PORT", 100, "MIN_WORKER_PORT", 1),
    ],
)
def test_one_end_of_the_workers_ports_may_be_set_alone(given, port, chosen, expected):
    ports = choose_ports({given: port}, False, 7)
    assert (ports[given], ports[chosen]) == (port, expected)


def test_two_clusters_on_a_node_do_not_meet():
    first = choose_ports({}, True, 7)
    with contextlib.ExitStack() as stack:
        for name, port in first.items():
            if not name.endswith("WORKER_PORT"):
                stack.enter_context(socket.create_server(("", port)))
        second = choose_ports({}, True, 7)
    assert not set(first.values()) & set(second.values())
    assert second["MIN_WORKER_PORT"] > first["MAX_WORKER_PORT"] or (
        second["MAX_WORKER_PORT"] < first["MIN_WORKER_PORT"]
    )


def test_a_port_that_is_set_and_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CannotContinue, match=f"PORT={port} is taken on node"):
            choose_ports({"PORT": port}, True, 0)
        worker = choose_ports({"PORT": port}, False, 0)
    assert "PORT" not in worker, "the head's alone"


def test_the_head_has_an_address_of_its_own_that_its_name_or_a_named_interface_has(monkeypatch):
    assert network.can_bind(0, "127.0.0.1")
    assert not network.can_bind(0, "203.0.113.7")
    monkeypatch.setattr(network, "can_bind", lambda _, address: address == "10.1.0.1")
    found = ["127.0.1.1", "203.0.113.7", "10.1.0.1"]
    monkeypatch.setattr(network.socket, "gethostbyname_ex", lambda _: ("n1", [], found))
    monkeypatch.setattr(network, "_ELSEWHERE", "127.0.0.1")
    assert head_address("n1", "") == "10.1.0.1"
    found.pop()
    assert head_address("n1", "") == "127.0.0.1", "the way to others"
    assert head_address("n1", "lo") == "127.0.0.1"
    with pytest.raises(CannotContinue, match=r"node n1 has no IPv4 address .*interface 'ib0'"):
        head_address("n1", "ib0")
    monkeypatch.setattr(network, "_ELSEWHERE", "::1")
    with pytest.raises(CannotContinue, match="by its name or the way to others"):
        head_address("n1", "")
