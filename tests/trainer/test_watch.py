"""How ranks meet and find each other missing, without processes; what follows is in tests/faults."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from nvfp4_train import phase, watch
from nvfp4_train.config import ConfigError
from nvfp4_train.distributed import _connect
from nvfp4_train.exits import ExitCode, PeerEnded
from nvfp4_train.watch import Cause, Watch, lost_contact

SETTINGS = {"config": {"optimizer": {"lr": 0.1}}, "code": "abc"}
LOST = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.fixture(autouse=True)
def at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """And however slow a test is, nobody ends its process."""
    phase.enter(phase.START)
    monkeypatch.setattr(watch, "UNWIND", 600.0)


@contextmanager
def ranks(*others: dict[str, object]) -> Iterator[list[Watch]]:
    """Rank 0, and rank 1 where its settings are given."""
    members = [Watch(0, 2, 5.0, SETTINGS), *(Watch(1, 2, 5.0, settings) for settings in others)]
    for member in members:
        member.timeout = 600.0
    yield members
    for member in members:
        member.finish()


def started(members: list[Watch], *addresses: str) -> list[BaseException | None]:
    """What each raises in `start`; rank 1 is first told these addresses, then that of rank 0."""
    told = iter([*addresses, members[0].listen()] if members[0]._listener is None else [])
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [pool.submit(members[0].start)]
        for member in members[1:]:
            last = f"{members[0]._listener.getsockname()[1]} {members[0]._token}"  # type: ignore[union-attr]
            member.connect("localhost", lambda last=last: next(told, last))
            futures.append(pool.submit(member.start))
        return [future.exception() for future in futures]


def test_ranks_with_the_same_settings_meet_and_leave() -> None:
    with ranks(SETTINGS) as members:
        assert started(members) == [None, None]
        for member in members:
            member.ending()
        members[1].finish()
    assert [member.cause for member in members] == [None, None]


def test_a_stranger_is_not_listened_to() -> None:
    with ranks(SETTINGS) as members:
        hub = members[0]
        hub.listen()
        assert hub._listener is not None
        port = hub._listener.getsockname()[1]
        with socket.create_connection(("localhost", port)) as one, socket.create_connection(("localhost", port)) as two:
            one.sendall(b"GET / HTTP/1.1\n")
            two.sendall(b'{"cause": {"rank": 1, "host": "x", "code": 2, "text": "made up"}}\n')
            assert started(members) == [None, None]
            assert (one.recv(1), two.recv(1)) == (b"", b"")
        assert hub.cause is None
        for member in members:
            member.ending()


def test_the_address_of_an_earlier_start_is_asked_for_again() -> None:
    """Nobody listens there any more, or somebody else does, who answers in his own way."""
    with socket.create_server(("", 0)) as dead:
        nobody = dead.getsockname()[1]
    with socket.create_server(("", 0)) as other, ThreadPoolExecutor(1) as pool, ranks(SETTINGS) as members:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\n")

        answered = pool.submit(answer)
        assert started(members, f"{nobody} old", f"{other.getsockname()[1]} old") == [None, None]
        answered.result()
        for member in members:
            member.ending()


def test_other_settings_are_named_on_both_sides() -> None:
    other = {"config": {"optimizer": {"lr": 0.2}}, "code": "abc"}
    said = "was started with another value of config.optimizer.lr (0.2 there, 0.1 on rank 0) than rank 0: "
    with ranks(other) as members:
        for member in members:
            member._unwinding = True
        waits, refused = started(members)
        told = members[1].explain(KeyboardInterrupt())  # by the launcher, because rank 0 was first to leave
        assert isinstance(told, ConfigError)
        assert str(told) == str(refused)
        for member, error in zip(members, (waits, refused), strict=True):
            assert error is not None
            assert member.explain(error) is error
    assert isinstance(refused, ConfigError)
    assert str(refused).startswith(f"rank 1 {said}")
    assert isinstance(waits, PeerEnded)
    assert waits.code == ExitCode.MISTAKE
    assert f"which {said}" in str(waits)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "COME", 0.2)
    with ranks() as members:
        (error,) = started(members)
    assert "of 2 ranks rank 1 did not come within 0.2 s" in str(error)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_is_the_cause_of_a_broken_collective(lost: int) -> None:
    """Its connection closes without a word."""
    with ranks(SETTINGS) as members:
        assert started(members) == [None, None]
        members[1 - lost]._unwinding = True  # its main thread is about to say so, and leaves by itself
        members[lost].finish()
        explained = members[1 - lost].explain(LOST)
    assert isinstance(explained, PeerEnded)
    assert explained.code == ExitCode.INTERNAL
    assert f"waited for rank {lost} on {socket.gethostname()}, which is gone" in str(explained)


@pytest.mark.parametrize("fails", [0, 1])
def test_the_first_error_is_everyones_cause(fails: int) -> None:
    with ranks(SETTINGS) as members:
        assert started(members) == [None, None]
        for member in members:
            member._unwinding = True
        phase.enter("data of step 3")
        error = ValueError("boom")
        assert members[fails].explain(error) is error
        explained = members[1 - fails].explain(LOST)
        second = members[1 - fails].explain(OSError("later"))
    assert f"waited for rank {fails} on " in str(explained)
    assert str(explained).endswith("which failed in data of step 3: ValueError: boom")
    assert str(second) == str(explained)


def test_a_rank_whose_main_thread_is_let_go_just_then_says_why_it_leaves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    member, said, left = Watch(1, 2, 5.0, SETTINGS), list[str](), list[int]()
    member.cause = Cause(0, "a01", ExitCode.INTERNAL, "failed")
    main = threading.Thread(target=member.report, args=[LOST], daemon=True)

    def say(text: str) -> None:
        said.append(text)
        main.start()
        main.join(0.2)
        assert main.is_alive()  # it goes on when this process has ended

    monkeypatch.setattr(watch, "tell", say)
    monkeypatch.setattr(watch.os, "_exit", left.append)
    member._leave_if_caused(watch.GRACE + 1)
    main.join()
    assert said == ["waited for rank 0 on a01, which failed"]
    assert left == [ExitCode.INTERNAL]


@pytest.mark.parametrize(("of_this_node", "says"), [(2, False), (1, True)])
def test_what_ended_a_rank_of_another_node_is_said_to_the_launcher_here(
    of_this_node: int, says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may end before it hears of it. The launcher that started the rank knows by itself."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": of_this_node}.items():
        monkeypatch.setenv(name, str(value))
    with ranks(SETTINGS) as members:
        assert started(members) == [None, None]
        for member in members:
            member._unwinding = True
        members[1].report(ConfigError("no such folder"))
        explained = members[0].explain(LOST)
    assert isinstance(explained, PeerEnded)
    assert explained.found_here == says


def test_a_world_without_an_address_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 is set and MASTER_ADDR or MASTER_PORT is not: start"):
        _connect(Watch(0, 2, 1.0, {}))


@pytest.mark.parametrize(("limits", "allowed"), [((256, 4096), 1000), ((4096, 4096), None), ((256, -1), 1000)])
def test_more_connections_than_a_process_may_have(
    limits: tuple[int, int], allowed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(watch.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(watch.resource, "setrlimit", lambda kind, now: given.append(now))
    watch._allow_files(1000)
    assert given == ([] if allowed is None else [(allowed, limits[1])])
    if limits[1] > 0:
        monkeypatch.setattr(watch.resource, "getrlimit", lambda kind: (256, 4096))
        with pytest.raises(ConfigError, match=r"needs 8704 open files for the connections of all ranks, .* is 4096"):
            Watch(0, 4096, 5.0, {}).listen()


def test_what_a_lost_contact_is() -> None:
    assert lost_contact(LOST)
    assert lost_contact(RuntimeError("NCCL error: remote process exited or there was a network error"))
    assert not lost_contact(ValueError("boom"))
    assert not lost_contact(ConfigError("backend: gloo or nccl"))
