"""Ranks that watch each other: when one fails, is killed or hangs, all end soon, with its error and its exit code.

A collective knows of a missing rank what the network saw of it, often minutes later. Here every rank keeps a connection
to rank 0 and gives a sign of life on it, from a thread of its own:

- a rank that fails says why, and rank 0 hands the first such cause on to all;
- a killed rank's connection closes at once;
- a rank that is stopped, or whose machine is lost, is silent, and is given up after `timeout` seconds.

At the start the same connections show who has come, and whether all were started with the same settings. No torch here.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from nvfp4_train import phase
from nvfp4_train.config import ConfigError
from nvfp4_train.exits import USER_MISTAKES, ExitCode, PeerEnded, code_of, leave_reason, on_this_node, where
from nvfp4_train.lasting import tell
from nvfp4_train.started_with import differences, flatten, settings_hash

COME = 600.0  # seconds for all ranks to come: imports over a network file system are slow
GRACE = 1.0  # seconds for a rank that waits to be freed by the broken connections of its collective
LOST = 5.0  # seconds to find out who is missing, once a collective has lost contact
UNWIND = 10.0  # seconds for a rank to leave by itself, with what a tracker still uploads
_POLL, _ANSWER, _BRIEF = 0.1, 60.0, 400
_FILES = 512  # open files for all else


@dataclass(frozen=True)
class Cause:
    """Why the run ends: what became first of which rank. `text` follows its name, `code` is everyone's exit code."""

    rank: int
    host: str
    code: int
    text: str


@dataclass
class Peer:
    """The other end of a connection: who it is, what it did when it last spoke and when that was (seconds)."""

    socket: socket.socket
    rank: int
    host: str = "?"
    phase: str = phase.START
    heard: float = field(default_factory=time.monotonic)
    same: bool = False
    leaves: bool = False
    buffer: bytes = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one line. A broken connection is found by the next read."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come, None once the connection is closed."""
        try:
            data = self.socket.recv(2**16)
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Watch:
    """This rank's part: a thread that speaks and listens, and what the main thread asks of it.

    Args:
        rank, size: of the world.
        timeout: seconds of silence after which a rank is given up; 0 gives up none.
        settings: what must be the same on all ranks, as nested JSON values.
    """

    def __init__(self, rank: int, size: int, timeout: float, settings: Mapping[str, Any]) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.cause: Cause | None = None
        self._settings: dict[str, Any] = json.loads(json.dumps(dict(flatten(settings))))
        self._beat = min(2.0, timeout / 5) if timeout else 2.0
        self._host = socket.gethostname()
        self._peers: list[Peer] = []  # of rank 0 all others, of the others rank 0
        self._listener: socket.socket | None = None
        self._token = ""
        self._selector = selectors.DefaultSelector()
        self._lock = threading.RLock()
        self._caused, self._together = threading.Event(), threading.Event()
        self._since = 0.0
        self._found_here = self._unwinding = self._ending = self._over = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # ---- what the main thread asks

    def listen(self) -> str:
        """Rank 0 opens a port; returns what the others need to find it: port and a secret.

        Raises ConfigError where the system does not let a process have so many connections.
        """
        _allow_files(2 * self.size + _FILES)  # torch's store has as many
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=self.size, dualstack_ipv6=dual)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_hex(8)
        return f"{self._listener.getsockname()[1]} {self._token}"

    def connect(self, host: str, address: Callable[[], str]) -> str:
        """Any other rank connects to rank 0 on `host`; returns the address at which it listens.

        Args:
            address: asks for it. It may still be that of an earlier start, whose rank 0 is gone.
        """
        deadline = time.monotonic() + COME
        while True:
            found = address()
            port, token = found.split()
            with suppress(OSError, ValueError):
                opened = socket.create_connection((host, int(port)), timeout=_ANSWER)
                hub = Peer(opened, 0, host)
                hub.send({"rank": self.rank, "host": self._host, "token": token, "hash": settings_hash(self._settings)})
                if _line(opened) == f"welcome {token}":
                    self._add(hub)
                    return found
                opened.close()
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank 0 on {host} did not answer at port {port} within {COME:g} s")
            time.sleep(_POLL)

    def start(self) -> None:
        """Begins, and waits until all ranks have come with the same settings.

        Raises ConfigError on a rank with other settings, PeerEnded where another one ended, RuntimeError where ranks do
        not come.
        """
        os.register_at_fork(after_in_child=self._close)  # a connection closes when this process ends, not its children
        self._thread.start()
        deadline = time.monotonic() + COME
        while not self._together.wait(_POLL):
            if self._caused.is_set():
                assert self.cause is not None
                raise self._ended(self.cause)
            if time.monotonic() > deadline:
                missing = set(range(self.size)) - {peer.rank for peer in self._peers} - {self.rank}
                who = f"rank {', '.join(map(str, sorted(missing)))}" if self.rank == 0 else "some ranks"
                raise RuntimeError(f"of {self.size} ranks {who} did not come within {COME:g} s")

    def report(self, error: BaseException) -> None:
        """This rank fails with `error`, which is the cause for all others, unless it is itself a consequence."""
        with self._lock:  # not while the thread says it for this rank
            self._unwinding = True
        if not lost_contact(error) and not isinstance(error, PeerEnded) and self.cause is None:
            cause = Cause(self.rank, self._host, code_of(error), happened(error))
            if self.rank == 0:
                self._accept(cause)
            else:
                self._tell({"cause": asdict(cause)})

    def explain(self, error: BaseException) -> BaseException:
        """What to raise where `error` ends this rank: itself, or PeerEnded where another rank is the cause."""
        self.report(error)
        lost = lost_contact(error)
        self._caused.wait(LOST if lost else GRACE)
        cause = self.cause
        if isinstance(error, PeerEnded):
            return error
        if cause is None:
            text = f"lost contact to another rank: {first_line(error)}"
            return PeerEnded(text, ExitCode.INTERNAL, found_here=False) if lost else error
        caused_here = cause.rank == self.rank and not lost
        if caused_here and (cause.code == ExitCode.INTERRUPTED or not isinstance(error, KeyboardInterrupt)):
            return error
        return self._ended(cause)

    def ending(self) -> None:
        """All is done, and ranks may leave from now on: a closed connection means nothing any more."""
        self._ending = True
        self._tell({"leaves": True})

    def finish(self) -> None:
        """The end of the watch."""
        self._over = True
        self._thread.join(5 * self._beat)
        self._close()

    # ---- the thread

    def _run(self) -> None:
        looked = spoke = time.monotonic()
        while not self._over:
            for key, _ in self._selector.select(self._beat / 4):
                if key.fileobj is self._listener:
                    with suppress(OSError):  # it has gone again
                        self._add(Peer(self._listener.accept()[0], -1))
                else:
                    self._hear(key.data)
            now = time.monotonic()
            if now - looked > max(self.timeout / 2, self._beat):  # it was this process that stood still
                for peer in self._peers:
                    peer.heard = now
            looked = now
            if now - spoke >= self._beat:
                spoke = now
                self._tell({"phase": phase.current()})
            self._give_up_the_silent(now)
            self._leave_if_caused(now)

    def _add(self, peer: Peer) -> None:
        peer.socket.settimeout(5.0)
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _hear(self, peer: Peer) -> None:
        try:
            messages = peer.read()
        except ValueError:  # nobody of ours
            messages = None
        if messages is None or (peer.rank < 0 and messages and messages[0].get("token") != self._token):
            self._selector.unregister(peer.socket)
            peer.socket.close()
            self._peers.remove(peer)
            if peer.rank >= 0 and not peer.leaves and not self._ending:
                self._found(peer, f"is gone, killed or lost with its machine; last heard of in {peer.phase}", False)
            return
        for message in messages:
            self._obey(peer, message)

    def _obey(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.phase = message.get("phase", peer.phase)
        peer.leaves = message.get("leaves", peer.leaves)
        if "rank" in message:
            peer.rank, peer.host = message["rank"], message["host"]
            peer.same = message["hash"] == settings_hash(self._settings)
            with suppress(OSError):
                peer.socket.sendall(f"welcome {self._token}\n".encode())
            if not peer.same:
                peer.send({"wanted": "settings"})
            if self.cause is not None:
                peer.send({"cause": asdict(self.cause)})
            elif {other.rank for other in self._peers if other.same} == set(range(1, self.size)):
                self._tell({"together": True, "host": self._host})
                self._together.set()
        if "wanted" in message:
            peer.send({"settings": self._settings})
        if "settings" in message:
            text = differences(self._settings, message["settings"])
            self._accept(Cause(peer.rank, peer.host, ExitCode.MISTAKE, text))
        if "together" in message:
            peer.host = message["host"]
            self._together.set()
        if "cause" in message:
            self._accept(Cause(**message["cause"]))

    def _tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            for peer in list(self._peers):
                if peer.rank >= 0:
                    peer.send(message)

    def _give_up_the_silent(self, now: float) -> None:
        if self.timeout:
            for peer in [peer for peer in self._peers if peer.rank >= 0 and now - peer.heard > self.timeout]:
                silence = f"has shown no sign of life for {self.timeout:g} s (parallel.timeout)"
                self._found(peer, f"{silence}; last heard of in {peer.phase}", True)

    def _found(self, peer: Peer, text: str, silent: bool) -> None:
        """Another rank is lost."""
        if self.cause is None:
            self._found_here = silent
        self._accept(Cause(peer.rank, peer.host, ExitCode.INTERNAL, text))

    def _accept(self, cause: Cause) -> None:
        """The first cause stands; rank 0 hands it on."""
        with self._lock:
            if self._over or self.cause is not None:
                return
            self.cause, self._since = cause, time.monotonic()
            if self.rank == 0:
                self._tell({"cause": asdict(cause)})
        self._caused.set()

    def _leave_if_caused(self, now: float) -> None:
        """Ends this process where its main thread is held fast."""
        with self._lock:  # for good: a main thread that is let go now does not say it once more
            cause = self.cause
            if cause is None or now - self._since < (UNWIND if self._unwinding else GRACE):
                return
            if not self._unwinding:
                ended = self._peer_ended(cause)
                tell(f"{where()}{ended}")
                if ended.found_here:
                    leave_reason(str(ended), cause.code)
            with suppress(Exception):
                sys.stdout.flush()
            os._exit(cause.code)

    def _ended(self, cause: Cause) -> Exception:
        """What this rank ends with for `cause`, which is its own where it was started otherwise than the others."""
        if cause.rank == self.rank and cause.code == ExitCode.MISTAKE:
            return ConfigError(f"rank {self.rank} {cause.text}")
        return self._peer_ended(cause)

    def _peer_ended(self, cause: Cause) -> PeerEnded:
        if cause.rank == self.rank:
            return PeerEnded(f"given up by the others: this rank {cause.text}", cause.code, found_here=False)
        text = f"waited for rank {cause.rank} on {cause.host}, which {cause.text}"
        return PeerEnded(text, cause.code, found_here=self._found_here or not on_this_node(cause.rank))

    def _close(self) -> None:
        for peer in self._peers:
            peer.socket.close()
        if self._listener is not None:
            self._listener.close()


def _allow_files(needed: int) -> None:
    """Raises this process's limit of open files where `needed` are more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"rank 0 needs {needed} open files for the connections of all ranks, and the limit is {hard}: raise it "
                f"on its node, as with `ulimit -Hn {needed}` for the user or LimitNOFILE of the service."
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _line(connection: socket.socket) -> str:
    """The next line, and no byte more; ValueError where it ends without one."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ValueError("closed")
        line += byte
    return line.decode().strip()


def lost_contact(error: BaseException) -> bool:
    """Whether `error` is what a collective raises of a rank that is no longer there."""
    network = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    said = str(error).lower()
    return network or (not isinstance(error, USER_MISTAKES) and ("gloo" in said or "nccl" in said))


def happened(error: BaseException) -> str:
    """What became of a rank, to follow its name: one line."""
    first = first_line(error)
    if isinstance(error, KeyboardInterrupt):
        return f"was interrupted in {phase.current()}"
    if isinstance(error, USER_MISTAKES):
        return f"found a mistake in {phase.current()}: {first}"
    return f"failed in {phase.current()}: {type(error).__name__}: {first}"


def first_line(error: BaseException) -> str:
    """The first line of what an error says, which may be long."""
    return (str(error).splitlines() or [""])[0][:_BRIEF]
