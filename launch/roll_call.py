"""Who is there: nodes meet under fixed ranks at a store that node 0 keeps, within a bounded wait, and end together.

torch's own rendezvous gives ranks in the order of addresses and says after its wait that somebody was missing. This one
keeps the ranks it is given, names who came and who did not, and carries the exit code of the node that ended the run.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from nvfp4_train.config import ConfigError

LINGER = 60.0  # seconds that node 0 keeps the store open for nodes that are still leaving
_POLL = 0.2
_ENDED, _LEFT, _ROUND = "ended", "left", "round"


@dataclass(frozen=True)
class Place:
    """One node's place: its rank among `nodes`, where node 0 listens, and how many seconds it waits for others."""

    rank: int
    nodes: int
    host: str
    port: int
    wait: float


class NodeGone(Exception):
    """Another node ended the run. `code`: the exit code it gave, `why`: what happened there, where that is known."""

    def __init__(self, code: int, node: str, why: str = "") -> None:
        super().__init__(f"{node} ended the run with exit code {code}: {why or 'its own output says why'}")
        self.code = code


def open_store(place: Place) -> TCPStore:
    """The store at which nodes meet: served by node 0, where the others wait for it.

    Raises ConfigError: the port is taken, the host has no address, or node 0 does not answer in time.
    """
    where, limit = f"{place.host}:{place.port}", timedelta(seconds=place.wait)
    try:
        socket.getaddrinfo(place.host, place.port)
    except OSError as error:
        raise ConfigError(
            f"--head {where}: {place.host} has no address here ({error}). Give the name or address of node 0 under "
            "which every node reaches it."
        ) from None
    serves = place.rank == 0
    try:
        return TCPStore(place.host, place.port, is_master=serves, timeout=limit, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        if serves:
            raise ConfigError(
                f"port {place.port} of this node can't be served ({brief(error)}). Another run or program "
                f"has it: end that, or give all nodes the same other port, as in --head {place.host}:{place.port + 1}."
            ) from None
        raise ConfigError(
            f"node 0 did not answer at {where} within {place.wait:g} s ({brief(error)}). Start it with the "
            "same --head and --node-rank 0; see that the name is that of node 0 and that no firewall closes the port."
        ) from None


def brief(error: Exception) -> str:
    """The first line of one of torch's network errors, without its C++ trace."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class RollCall(RendezvousHandler):
    """torch's rendezvous interface: every round (the start, and each restart) waits for all nodes.

    Args:
        store: from `open_store`.
        place: of this node; its port is that of `store`.
        name: of this node, for what is said.
    """

    def __init__(self, store: Store, place: Place, name: str) -> None:
        self._store, self._place, self._name, self._round = store, place, name, 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until every node is there.

        Raises ConfigError: not all came in time, named; or this rank is taken. NodeGone: another node ended the run.
        """
        place, deadline = self._place, time.monotonic() + self._place.wait
        self._round = self._store.add(_ROUND, 0) + 1
        if self._store.add(self._key("seat", place.rank), 1) > 1:
            taken_by = self._store.get(self._key("name", place.rank)).decode()
            raise ConfigError(f"--node-rank {place.rank}: {taken_by} has this rank. Give every node a rank of its own.")
        self._store.set(self._key("name", place.rank), self._name)
        self._store.set(self._key("called"), "")
        if self._store.add(self._key("count"), 1) == place.nodes:
            self._store.add(_ROUND, 1)
            self._store.set(self._key("complete"), "")
        while not self._store.check([self._key("complete")]):
            self._raise_if_ended()
            if time.monotonic() > deadline:
                raise ConfigError(self._missing())
            time.sleep(_POLL)
        # Processes meet at this store too: a port of their own, free a moment ago, may be taken before they open it.
        address = RendezvousStoreInfo(place.host, place.port)
        return RendezvousInfo(PrefixStore(f"round {self._round}", self._store), place.rank, place.nodes, address)

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._round} {what}" + ("" if rank is None else f" {rank}")

    def _missing(self) -> str:
        """Who came and who did not."""
        came, missing = [], []
        for rank in range(self._place.nodes):
            if self._store.check([self._key("name", rank)]):
                came.append(f"node {rank} ({self._store.get(self._key('name', rank)).decode()})")
            else:
                missing.append(f"node {rank}")
        return (
            f"{len(came)} of {self._place.nodes} nodes came to {self._place.host}:{self._place.port} within "
            f"{self._place.wait:g} s: {', '.join(came)}. Missing: {', '.join(missing)}. Start those with the same "
            "--head and --nodes, see why they did not start, or wait longer with --wait SECONDS."
        )

    # ---- the end

    def end(self, code: int, why: str = "") -> int:
        """Tell all nodes that the run is over. Returns the code that stands: of the node that said so first."""
        said = self._store.compare_set(_ENDED, "", f"{code} node {self._place.rank} ({self._name})\n{why}")
        return int(said.split()[0])

    def finished(self) -> None:
        """Tell all nodes that a process of this round was done."""
        self._store.set(self._key("finished"), "")

    def is_finished(self) -> bool:
        """Whether a process of this round was done, on any node."""
        return bool(self._store.check([self._key("finished")]))

    def ended(self) -> NodeGone | None:
        """Who ended the run, None while it goes on."""
        if not self._store.check([_ENDED]):
            return None
        ended, _, why = self._store.get(_ENDED).decode().partition("\n")
        code, _, node = ended.partition(" ")
        return NodeGone(int(code), node, why)

    def _raise_if_ended(self) -> None:
        gone = self.ended()
        if gone is not None:
            raise gone

    def shutdown(self) -> bool:
        """Leave; node 0 stays until all that came have left, or for LINGER seconds."""
        left, deadline = self._store.add(_LEFT, 1), time.monotonic() + LINGER
        while self._place.rank == 0 and left < self._store.add(self._key("count"), 0) and time.monotonic() < deadline:
            time.sleep(_POLL)
            left = self._store.add(_LEFT, 0)
        return True

    # ---- the rest of torch's interface

    @property
    def use_agent_store(self) -> bool:
        """Processes are told that the store is served, see `next_rendezvous`."""
        return True

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "roll-call"

    def get_run_id(self) -> str:
        """Where the nodes meet."""
        return f"{self._place.host}:{self._place.port}"

    def num_nodes_waiting(self) -> int:
        """Above 0 when a node has begun another round, because its processes failed or it came again."""
        return int(self._store.check([f"{self._round + 1} called"]))

    def is_closed(self) -> bool:
        """Whether a node ended the run."""
        return self.ended() is not None

    def set_closed(self) -> None:
        """`end` does that, with a code."""
