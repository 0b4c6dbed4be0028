"""What the launcher makes of the ends of its processes. The processes here do one thing and import nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from nvfp4_train.exits import ExitCode
from tests.launch.conftest import children, free_port, launcher, lines_of, start, wait_until

STAND_IN = """
import os, signal, sys, time
if "RANK" in os.environ:  # in place of training
    with open(os.environ["STARTS"], "a") as file:
        print(os.environ["RANK"], signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, []), file=file)
{body}
"""
CRASH = "    os._exit(1)"
# No pause(): it would wait for ever for a signal that came just before it.
WAIT = """
    heard = []
    def hear(number, frame):
        heard.append(number)
        os.write(1, f"heard {{len(heard)}}\\n".encode())
    signal.signal(signal.SIGTERM, hear)
    print("ready", flush=True)
    while len(heard) < {number}:
        time.sleep(0.01)
    time.sleep({linger} * int(os.environ["RANK"]))
    os._exit(75)
"""
DEAF = """
    print("ready", flush=True)
    time.sleep(600)
"""
STRUCK = """
else:  # the launcher gets a signal as soon as the first of its processes is there
    import subprocess
    start = subprocess.Popen.__init__
    def struck(*args, **options):
        start(*args, **options)
        subprocess.Popen.__init__ = start
        os.kill(os.getpid(), signal.{number.name})
    subprocess.Popen.__init__ = struck
"""


def wait(number: int = 1, linger: float = 0.0) -> str:
    """A process that leaves after so many signals, and seconds that rank 1 takes for it."""
    return WAIT.format(number=number, linger=linger)


def in_place_of_training(folder: Path, body: str) -> tuple[dict[str, str], Path, Path]:
    """Variables that put `body` in place of training, the file in which each start leaves a line, and an output."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(STAND_IN.format(body=body))
    return {"PYTHONPATH": str(folder), "STARTS": str(folder / "starts")}, folder / "starts", folder / "out"


def test_after_so_many_restarts_the_code_is_that_of_a_crash(tmp_path: Path) -> None:
    variables, starts, output = in_place_of_training(tmp_path, CRASH)
    process = start(launcher("--processes", "1", "--restarts", "2"), output, **variables)
    assert process.wait(timeout=300) == ExitCode.INTERNAL
    assert lines_of(starts) == 3
    said = [line for line in output.read_text().splitlines() if line.startswith("launch: ")]
    assert [line.partition("(internal)")[2] for line in said] == [
        "",
        "",
        "",
    ]
    assert [line.partition(": rank")[0] for line in said[:2]] == [
        "launch: restart 1 of 2 goes on from the last checkpoint",
        "launch: restart 2 of 2 goes on from the last checkpoint",
    ]


def test_a_signal_asks_once_and_nothing_is_started_again(tmp_path: Path) -> None:
    variables, starts, output = in_place_of_training(tmp_path, wait())
    process = start(launcher("--processes", "2", "--restarts", "3"), output, **variables)
    wait_until(lambda: output.read_text().count("ready") == 2, process, output)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=300) == ExitCode.INTERRUPTED, output.read_text()
    assert sorted(starts.read_text().splitlines()) == ["0 True", "1 True"]  # SIGUSR1 does not reach them
    assert "SIGUSR1: asking the processes of this node to save and leave" in output.read_text()


def test_a_second_signal_is_handed_on(tmp_path: Path) -> None:
    variables, _, output = in_place_of_training(tmp_path, wait(2))
    process = start(launcher("--processes", "1"), output, **variables)
    wait_until(lambda: "ready" in output.read_text(), process, output)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "heard 1" in output.read_text(), process, output)  # two at once would be one
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == ExitCode.INTERRUPTED


def test_processes_that_were_asked_leave_in_their_own_time(tmp_path: Path) -> None:
    """The first that has left does not have the others told once more, which means to leave at once."""
    variables, _, output = in_place_of_training(tmp_path, wait(linger=1.0))
    process = start(launcher("--processes", "2"), output, **variables)
    wait_until(lambda: output.read_text().count("ready") == 2, process, output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == ExitCode.INTERRUPTED, output.read_text()
    assert [line for line in output.read_text().splitlines() if line.startswith("heard")] == ["heard 1"] * 2


@pytest.mark.parametrize(
    ("body", "number"), [(wait(), signal.SIGTERM), (DEAF, signal.SIGTERM), (wait(), signal.SIGUSR1)]
)
def test_a_signal_while_processes_are_being_started_is_for_all_of_them(
    body: str, number: signal.Signals, tmp_path: Path
) -> None:
    variables, starts, output = in_place_of_training(tmp_path, body + STRUCK.format(number=number))
    process = start(launcher("--processes", "2", "--restarts", "3"), output, **variables)
    assert process.wait(timeout=300) == ExitCode.INTERRUPTED, output.read_text()
    said = output.read_text()
    assert said.count(f"launch: {number.name}: asking the processes of this node to save and leave") == 1
    assert "Traceback" not in said
    assert lines_of(starts) <= 2


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    """It ends before torch is imported, so this is cheap."""
    output = tmp_path / "out"
    process = start(launcher("--processes", "2", "--restarts", "3", "--", "data.pth=x"), output)
    assert process.wait(timeout=300) == ExitCode.MISTAKE
    said = output.read_text()
    assert "data.pth: there is no such key" in said
    last = said.splitlines()[-1]
    assert "ended with exit code 2 (mistake), in start: error: data.pth: there is no such key" in last
    assert "restart" not in said


def test_all_nodes_end_with_the_code_of_the_one_that_failed(tmp_path: Path) -> None:
    """The mistake in the command line of node 1 is found once the process of node 0 is there, which waits for ever."""
    variables, _, output = in_place_of_training(tmp_path, wait())
    until_ready = f"    while 'ready' not in open({str(output)!r}).read():\n        time.sleep(0.01)"
    late, _, _ = in_place_of_training(tmp_path / "second", until_ready)
    where = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1"]
    first = start(launcher(*where, "--node-rank", "0"), output, **variables)
    second = start(launcher(*where, "--node-rank", "1", "--", "steps=x"), tmp_path / "second" / "out", **late)
    assert second.wait(timeout=300) == ExitCode.MISTAKE
    assert first.wait(timeout=300) == ExitCode.MISTAKE, output.read_text()
    heard, last = output.read_text().splitlines()[-2:]
    assert heard == "heard 1", "what processes say when they are told to end comes before the reason"
    assert last.startswith("launch: node 1 (")
    assert "ended the run with exit code 2: rank 1 on" in last
    assert "steps: wanted a whole number" in last


def test_without_node_0_the_others_end(tmp_path: Path) -> None:
    variables, starts, output = in_place_of_training(tmp_path, wait())
    where = ["--nodes", "2", "--head", f"localhost:{free_port()}", "--processes", "1", "--restarts", "3"]
    nodes = [start(launcher(*where, "--node-rank", str(rank)), output, **variables) for rank in range(2)]
    wait_until(lambda: lines_of(starts) == 2, nodes[1], output)
    orphans = children(nodes[0].pid)
    nodes[0].kill()
    assert nodes[1].wait(timeout=300) == ExitCode.INTERNAL
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    assert "launch: lost node 0 at localhost:" in output.read_text()
