"""Addresses and ports of a node, on this machine's own."""

import contextlib
import io
import socket

import pytest

from nemo_run_ray.remote.slurm import network
from nemo_run_ray.remote.slurm.folder import NodeReport
from nemo_run_ray.remote.slurm.network import (
    AddressDiscovery,
    Ports,
    head_addresses,
)
from nemo_run_ray.remote.slurm.settings import CannotContinue
from tests.unit.remote.slurm.test_slurm_decide import settings_with


def _choose(wanted: dict[str, int], is_head: bool, salt: int) -> dict[str, int]:
    return Ports(wanted, is_head, salt).choose()


@pytest.mark.parametrize(
    ("kernels_first", "least"),
    [(60000, 10240), (32768, 10240), (14336, 10240), (14335, 1200), (9000, 1200), (2500, 1200)],
)
def test_no_port_is_one_that_the_kernel_gives_to_connections(monkeypatch, kernels_first, least):
    """Its range begins at 9000 on some machines."""
    text = f"{kernels_first}\t60999\n"
    monkeypatch.setattr(network, "open", lambda *_, **__: io.StringIO(text), raising=False)
    for salt in range(30):
        ports = _choose({}, True, salt)
        assert max(ports.values()) < min(kernels_first, 32768)
        first, last = ports["MIN_WORKER_PORT"], ports["MAX_WORKER_PORT"]
        assert first >= least
        services = [port for name, port in ports.items() if "WORKER" not in name]
        assert len(set(services)) == len(services) == 9
        assert not any(first <= port <= last for port in services), "`ray start` refuses that"
        assert last - first > 900


def test_two_clusters_on_a_node_do_not_meet():
    first = _choose({}, True, 7)
    with contextlib.ExitStack() as stack:
        for name, port in first.items():
            if not name.endswith("WORKER_PORT"):
                stack.enter_context(socket.create_server(("", port)))
        second = _choose({}, True, 7)
    assert not set(first.values()) & set(second.values())
    assert second["MIN_WORKER_PORT"] > first["MAX_WORKER_PORT"] or (
        second["MAX_WORKER_PORT"] < first["MIN_WORKER_PORT"]
    )


def test_ports_of_the_user_are_taken_as_they_are():
    with socket.create_server(("", 0)) as server:
        free = server.getsockname()[1]
    chosen = _choose({"NODE_MANAGER_PORT": free, "MIN_WORKER_PORT": 54001}, False, 0)
    assert chosen["NODE_MANAGER_PORT"] == free
    assert (chosen["MIN_WORKER_PORT"], chosen["MAX_WORKER_PORT"]) == (54001, 54257)


def test_a_port_that_is_set_and_taken_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(CannotContinue, match=f"PORT={port} is taken on node"):
            _choose({"PORT": port}, True, 0)
        worker = _choose({"PORT": port}, False, 0)
    assert "PORT" not in worker, "the head's alone"


def test_the_head_offers_what_its_name_resolves_to_first(monkeypatch):
    monkeypatch.setattr(
        network, "addresses_by_interface", lambda: {"a": "10.0.0.1", "b": "10.1.0.1"}
    )
    rows = [(0, 0, 0, "", ("10.1.0.1", 0)), (0, 0, 0, "", ("192.0.2.77", 0))]
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_: rows)
    assert head_addresses("n1", "") == ["10.1.0.1", "10.0.0.1"]
    assert head_addresses("n1", "a") == ["10.0.0.1"]
    with pytest.raises(CannotContinue, match=r"node n1 lacks the network interface 'ib0'"):
        head_addresses("n1", "ib0")


def _report(host: str, *addresses: str) -> NodeReport:
    return NodeReport(host=host, reached=list(addresses))


def test_the_address_that_every_worker_reaches_is_chosen():
    discovery = AddressDiscovery(["a", "b", "c"], settings_with(), Ports({}, False, 0))
    assert network._FIRST <= discovery.port < network._range()[1]
    assert discovery.choose({0: NodeReport("n1"), 1: NodeReport("n2")}) is None
    assert discovery.choose({1: _report("n2", "b", "c")}) is None, "another one is still silent"
    assert discovery.choose({1: _report("n2", "b", "c"), 2: _report("n3", "a", "c")}) == "c"


def test_a_head_that_nobody_reaches_says_who_reaches_what():
    discovery = AddressDiscovery(["a", "b"], settings_with(), Ports({}, False, 0))
    with pytest.raises(CannotContinue, match=r"n2 reaches a; n3 reaches none.*INTERFACE"):
        discovery.choose({1: _report("n2", "a"), 2: _report("n3")})
