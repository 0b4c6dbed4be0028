"""Nodes that meet: all, too few, two of one rank, a port that is taken; and how they end together."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore, Store

from launch.roll_call import NodeGone, Place, RollCall, open_store
from nvfp4_train.config import ConfigError
from tests.launch.conftest import free_port

PLACE = Place(rank=0, nodes=3, host="localhost", port=29500, wait=30.0)


def node(store: Store, rank: int, **changed: float) -> RollCall:
    return RollCall(store, replace(PLACE, rank=rank, **changed), f"host-{rank}")  # type: ignore[arg-type]


def test_all_come_under_their_own_ranks_and_agree_on_an_address() -> None:
    store = HashStore()
    nodes = [node(store, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(RollCall.next_rendezvous, nodes))
    assert [(info.rank, info.world_size) for info in found] == [(0, 3), (1, 3), (2, 3)]
    addresses = {(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}
    assert addresses == {("localhost", 29500)}, "where the nodes met: no port that may be taken meanwhile"
    assert all(call.use_agent_store for call in nodes)
    assert [call.num_nodes_waiting() for call in nodes] == [0, 0, 0]


def test_a_restart_on_one_node_is_seen_by_the_others_and_waits_for_them() -> None:
    store = HashStore()
    nodes = [node(store, rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(RollCall.next_rendezvous, nodes))
        again: Future[object] = pool.submit(nodes[1].next_rendezvous)
        while not nodes[0].num_nodes_waiting():
            assert not again.done()
        second = [pool.submit(nodes[rank].next_rendezvous) for rank in (0, 2)]
        ranks = [future.result().rank for future in (second[0], again, second[1])]  # type: ignore[attr-defined]
    assert ranks == [0, 1, 2]
    first[0].store.set("key", "of the first round")
    assert not second[0].result().store.check(["key"])


def test_a_node_that_was_replaced_takes_its_rank_in_the_next_round() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        nodes = [node(store, rank) for rank in range(3)]
        list(pool.map(RollCall.next_rendezvous, nodes))
        nodes[1] = node(store, 1)
        again = pool.submit(nodes[1].next_rendezvous)
        while not nodes[2].num_nodes_waiting():
            assert not again.done()
        found = [*pool.map(RollCall.next_rendezvous, [nodes[0], nodes[2]]), again.result()]
    assert [info.rank for info in found] == [0, 2, 1]


def test_node_0_stays_until_those_that_came_have_left() -> None:
    store = HashStore()
    nodes = [node(store, rank, wait=0.0) for rank in (0, 1)]  # and the third never comes
    for call in nodes:
        with pytest.raises(ConfigError):
            call.next_rendezvous()
    with ThreadPoolExecutor(1) as pool:
        stays = pool.submit(nodes[0].shutdown)
        assert not stays.done()
        nodes[1].shutdown()
        assert stays.result(timeout=10)


def test_a_node_that_never_comes_is_named_beside_those_that_came() -> None:
    store = HashStore()
    nodes = [node(store, rank, wait=0.0) for rank in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception() for future in [pool.submit(call.next_rendezvous) for call in nodes]]
    said = max(map(str, errors), key=len)
    assert all(isinstance(error, ConfigError) for error in errors)
    assert "Missing: node 1" in said
    assert "of 3 nodes came to localhost:29500 within 0 s" in said


def test_who_came() -> None:
    store = HashStore()
    with pytest.raises(ConfigError):
        node(store, 0, wait=0.0).next_rendezvous()
    with pytest.raises(
        ConfigError, match=r"2 of 3 nodes came .*: node 0 \(host-0\), node 2 \(host-2\). Missing: node 1."
    ):
        node(store, 2, wait=0.0).next_rendezvous()


def test_two_nodes_of_one_rank() -> None:
    store = HashStore()
    with pytest.raises(ConfigError):
        node(store, 1, wait=0.0).next_rendezvous()
    with pytest.raises(ConfigError, match=r"--node-rank 1: host-1 has this rank"):
        node(store, 1).next_rendezvous()


def test_the_first_to_end_the_run_decides_the_code_and_those_that_wait_hear_of_it() -> None:
    store = HashStore()
    one, other = node(store, 0), node(store, 1)
    assert one.ended() is None
    assert other.end(75) == 75
    assert one.end(1) == 75
    gone = one.ended()
    assert gone is not None
    assert (gone.code, str(gone)) == (75, "node 1 (host-1) ended the run with exit code 75: its own output says why")
    with pytest.raises(NodeGone):
        one.next_rendezvous()


def test_a_port_in_use_is_said_clearly() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} of this node can't be served .*--head localhost:{port + 1}"
        ):
            open_store(replace(PLACE, port=port))


def test_node_0_that_never_answers() -> None:
    port = free_port()
    with pytest.raises(ConfigError, match=rf"node 0 did not answer at localhost:{port} within 0.1 s"):
        open_store(replace(PLACE, rank=1, port=port, wait=0.1))


def test_a_head_without_an_address() -> None:
    with pytest.raises(ConfigError, match=r"--head no-such-host.invalid:29500: no-such-host.invalid has no address"):
        open_store(replace(PLACE, rank=1, host="no-such-host.invalid"))
