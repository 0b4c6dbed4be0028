"""The front door of every command: arguments, help, several runs in turn, and what an exception becomes. No torch here.

A command whose configuration comes from YAML files and overrides is one line: `sys.exit(cli.run(body, "train"))`, where
`body(config)` returns an exit code or nothing. Other commands wrap what they do in `guarded`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from nvfp4_train.compose import compose
from nvfp4_train.config import ConfigError, RunConfig
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.layout import check_run
from nvfp4_train.overrides import expand_sweeps, find_groups
from nvfp4_train.schema import key_types, near_misses, to_yaml

__all__ = ["ExitCode", "compose", "execute", "guarded", "help_text", "parse_arguments", "run"]


@dataclass(frozen=True)
class Command:
    """What `--help` says of a command, name to meaning. `flags`: options without a value; `numbers`: with a number;
    `keys`: a line of those that are its alone.
    """

    purpose: str
    flags: dict[str, str]
    numbers: dict[str, str] = field(default_factory=dict)
    keys: str = ""


COMMANDS = {
    "train": Command("Trains one model, or continues the run that run_dir holds.", {}),
    "prepare": Command(
        "Turns text into tokens on disk, once for each source; training then reads those.",
        {},
        keys="  tokenizer.train=FILE  tokenizer.vocab_size=N  tokenizer.special_tokens=[...]  shard=1/8\n",
    ),
    "plan": Command(
        "Says what a run would be, and trains nothing: parameters, FLOPs, memory, time, what runs in which format.",
        {"json": "print JSON alone", "recipes": "list the precision recipes"},
        {"world": "plan for N processes, and build each pipeline stage's shapes"},
    ),
}


TRAINS = ("train", "plan")  # commands whose configuration must be one that can be trained


@dataclass(frozen=True)
class Arguments:
    """A parsed command line: overrides as typed, folders of the user's own, flags and numbers that were given."""

    command: str
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    multirun: bool
    show: bool
    flags: frozenset[str]
    numbers: Mapping[str, int]

    @property
    def world_size(self) -> int:
        """Processes of the run: as asked for, or those that were started."""
        return self.numbers.get("world", int(os.environ.get("WORLD_SIZE", 1)))


def run(body: Callable[[RunConfig], int | None], command: str, argv: Sequence[str] | None = None) -> int:
    """Runs one of COMMANDS from its command line and returns its exit code.

    Args:
        body: receives the checked configuration; returns an exit code, or nothing for 'done'.
        command: its name, for help and for the processes of --multirun.
        argv: arguments without the program's name; by default those of this process.
    """
    return guarded(lambda: execute(parse_arguments(command, argv), body))


def execute(arguments: Arguments, body: Callable[[RunConfig], int | None]) -> int | None:
    """Composes the configuration and calls `body`; or shows it (`--cfg job`), or starts several runs (`--multirun`)."""
    if arguments.multirun:
        return _multirun(arguments)
    config = compose(arguments.overrides, arguments.config_dirs)
    if arguments.show:
        print(to_yaml(config), end="")
        return ExitCode.DONE
    if arguments.command in TRAINS:
        check_run(config, arguments.world_size)
    return body(config)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def parse_arguments(command: str, argv: Sequence[str] | None = None) -> Arguments:
    """Reads a command line. Prints help and leaves for --help; ConfigError for options that do not exist."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(prog=f"nvfp4_train.{command}", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--hydra-help", action="store_true", dest="help")
    parser.add_argument("--cfg", "-c")
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    flags = COMMANDS[command].flags
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    for name in COMMANDS[command].numbers:
        parser.add_argument(f"--{name}", type=int)
    known, unknown = parser.parse_known_intermixed_args(argv)
    for option in unknown:
        _refuse(option, command)
    if known.help:
        print(help_text(command, known.config_dir))
        raise SystemExit(ExitCode.DONE)
    if known.cfg not in (None, "job"):
        raise ConfigError(
            f"--cfg {known.cfg}: only `--cfg job` is there; it prints the configuration as it would be used."
        )
    given = frozenset(flag for flag in flags if getattr(known, flag))
    numbers = {name: getattr(known, name) for name in COMMANDS[command].numbers if getattr(known, name) is not None}
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"--{name} {number}: wanted 1 or more.")
    overrides, folders = tuple(known.overrides), tuple(known.config_dir)
    return Arguments(command, overrides, folders, known.multirun, known.cfg is not None, given, numbers)


def _refuse(option: str, command: str) -> NoReturn:
    name, _, value = option.lstrip("-").partition("=")
    if name.replace("-", "_") in (
        "local_rank",
        "nproc_per_node",
        "use_env",
        "node_rank",
        "nnodes",
        "master_addr",
        "master_port",
    ):
        raise ConfigError(
            f"{option}: comes from torch's old launcher. Use torchrun, which speaks through the environment: "
            f"torchrun --nproc-per-node N -m nvfp4_train.{command} [overrides]"
        )
    near = near_misses(name.replace("-", "_"), key_types(RunConfig))
    hint = f" Write it without dashes, as an override: {near[0]}={value or 'VALUE'}." if near else ""
    raise ConfigError(f"{option}: there is no such option.{hint} See --help.")


def help_text(command: str, config_dirs: Sequence[str] = ()) -> str:
    """What `--help` prints: use, the choices of every group, the keys that are changed most."""
    groups = find_groups(config_dirs).options
    width = max(map(len, groups)) + 2
    listing = "\n".join(f"  {name:<{width}}{', '.join(options)}" for name, options in groups.items())
    known = COMMANDS[command]
    options = {f"--{flag}": meaning for flag, meaning in known.flags.items()}
    options |= {f"--{name} N": meaning for name, meaning in known.numbers.items()}
    flags = "".join(f"  {option:<19}{meaning}\n" for option, meaning in options.items())
    return f"""{COMMANDS[command].purpose}

python -m nvfp4_train.{command} [GROUP=NAME] [KEY=VALUE] [options]

Groups (a file each in configs/; experiment and debug may change any key)
{listing}

Keys, the most used (all of them: --cfg job; their meaning: nvfp4_train/config.py)
{known.keys}  steps=N  seed=N  run_dir=PATH  resume=auto|never|PATH  stop_after=N  baseline=RUN_DIR
  data.path=PATH  data.tokenizer=byte|FILE  data.global_batch=N  data.micro_batch=N  data.sequence_length=N
  model.pattern=TEXT  model.hidden_size=N  optimizer.lr=X  schedule.warmup=DURATION  schedule.decay=DURATION
  precision.bf16_blocks.first=N  precision.bf16_blocks.last=N|SHARE  precision.rotation=null|16|32|64|128
  precision.gradient_rounding=nearest|stochastic  precision.weight_tile=[16,16]|[1,16]
  precision.four_over_six=null|mse|mae  precision.backend=auto|emulated|native|transformer_engine
  precision.gemm=exact|bf16_scaled
  'precision.phases=[{{start: 0.82, forward: bf16}}]'  'precision.rules=[{{match: "*.out_proj", format: mxfp8}}]'
  parallel.tensor=N  parallel.pipeline=N  parallel.context=N  parallel.sequence=true|false
  checkpoint.every=N  checkpoint.keep=N  evaluation.every=N  logging.wandb=auto|online|offline|disabled
A DURATION is a share of the run below 1, a number of steps, or a text such as '2B tokens'.

Options
  --cfg job          print the whole configuration as it would be used, and leave
  --multirun, -m     one run after another for every combination of values: seed=1,2 precision=fp8_block,nvfp4
  --config-dir DIR   more YAML files, laid out as configs/: DIR/precision/mine.yaml is chosen with precision=mine
{flags}  --help, -h         this text

Exit codes: 0 done, 1 an error of ours (with traceback), 2 a mistake in what was asked; all in nvfp4_train/README.md"""


def _multirun(arguments: Arguments) -> int:
    """One process for every combination of values, one after another; the first exit code that is not 0 is returned."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ConfigError(
            "--multirun under torchrun would start every run on every rank. Start one torchrun for each combination "
            "instead, for example: for seed in 1 2; do torchrun ... -m nvfp4_train.train seed=$seed; done"
        )
    jobs = list(expand_sweeps(arguments.overrides))
    configs = [compose(job, arguments.config_dirs) for job in jobs]
    folders = [config.run_dir for config in configs if config.run_dir is not None]
    for folder in folders:
        if folders.count(folder) > 1:
            raise ConfigError(
                f"run_dir={folder}: several of these {len(jobs)} runs would share one folder. Leave run_dir out, "
                "or let it name what differs, as in run_dir='runs/seed-${seed}'."
            )
    if arguments.show:
        print("---\n".join(to_yaml(config) for config in configs), end="")
        return ExitCode.DONE
    options = [text for folder in arguments.config_dirs for text in ("--config-dir", folder)]
    options += [f"--{flag}" for flag in sorted(arguments.flags)]
    options += [text for name, number in arguments.numbers.items() for text in (f"--{name}", str(number))]
    worst = int(ExitCode.DONE)
    for number, job in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {' '.join(job)}", file=sys.stderr, flush=True)
        code = _run_child([sys.executable, "-m", f"nvfp4_train.{arguments.command}", *job, *options])
        print(f"run {number} of {len(jobs)}: exit code {code}", file=sys.stderr, flush=True)
        worst = worst or code
        if code == ExitCode.INTERRUPTED:
            break
    return worst


def _run_child(command: list[str]) -> int:
    """Runs a process to its end; a signal that asks this one to stop is the child's to obey."""
    child: subprocess.Popen[bytes] | None = None
    early, told = list[int](), list[int]()

    def forward(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # A terminal sends Ctrl-C to both processes: the child alone answers it.
    handlers: dict[int, Any] = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: forward}
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        child = subprocess.Popen(command)
        for number in early:
            child.send_signal(number)
        code = child.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if -code in told:  # it could not listen yet
        return ExitCode.INTERRUPTED
    return code if code >= 0 else 128 - code
