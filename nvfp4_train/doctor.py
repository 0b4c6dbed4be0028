"""`python -m nvfp4_train.doctor`: what is installed, what this machine can run, and how to mend what can't.

Whatever could crash or hang is tried in a process of its own, so this one needs neither torch nor luck.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from shlex import quote
from typing import Any

from nvfp4_train.environment import version
from nvfp4_train.exits import ExitCode, guarded
from nvfp4_train.precision.backends import NATIVE_SINCE, native_formats
from nvfp4_train.precision.formats import FP8_FORMATS

ROOT = Path(__file__).resolve().parent.parent
PROBE_SECONDS = 180
LEAST_FREE_GIB = 2

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": [], "problem": None, "archs": []}
try:
    torch.cuda.init()
    found["archs"] = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["devices"].append([properties.name, properties.major, properties.minor, properties.total_memory])
except Exception as error:
    found["problem"] = str(error).splitlines()[0]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Extension:
    """A compiled package that speeds a GPU up.

    Attributes:
        package: its distribution. module: what is imported. role: what it is for.
        without: what runs in its place.
    """

    package: str
    module: str
    role: str
    without: str


ENGINE = "transformer-engine"
EXTENSIONS = (
    Extension("mamba-ssm", "mamba_ssm", "fused Mamba-2 scan", "the PyTorch scan (model.kernels=torch) runs, slower"),
    Extension("causal-conv1d", "causal_conv1d", "fused causal convolution", "PyTorch's convolution runs, slower"),
    Extension(
        ENGINE,
        "transformer_engine.pytorch",
        "native NVFP4 and MXFP8 on Blackwell, precision.backend=transformer_engine",
        "every recipe runs with precision.backend=emulated, FP8 natively by this package",
    ),
)


@dataclass(frozen=True)
class Probe:
    """How an attempt in a process of its own ended: its output, or why it failed, the causes after the last error."""

    output: str
    failure: str | None


def probe(code: str) -> Probe:
    """Runs Python code in a new process."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return Probe("", f"no answer within {PROBE_SECONDS} s")
    if done.returncode == 0:
        return Probe(done.stdout, None)
    if done.returncode < 0:
        return Probe(done.stdout, f"the process died of signal {-done.returncode}")
    return Probe(done.stdout, error_chain(done.stderr))


def error_chain(text: str) -> str:
    """The errors of a traceback, the last one first and what it came from after it."""
    errors = [line.strip() for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|NotFound)\b", line)]
    last = [line for line in text.splitlines() if line.strip()][-1:] or ["no message"]
    return "; caused by ".join(dict.fromkeys(reversed(errors or last)))


def built_for_torch(package: str) -> str | None:
    """The torch version that a distribution was built for, as far as its version, wheel or requirements say."""
    found = metadata.distribution(package)
    sources = [found.version, found.read_text("direct_url.json") or "", found.read_text("WHEEL") or ""]
    for text in sources:
        match = re.search(r"(?:torch|pt)[-_.]?(\d+\.\d+(?:\.\d+)?)", text)
        if match:
            return match.group(1)
    pinned = (re.match(r"torch\s*\(?==\s*(\d+\.\d+(?:\.\d+)?)", line) for line in found.requires or [])
    return next((match.group(1) for match in pinned if match), None)


def examine(extension: Extension, failure: str | None, torch_version: str | None) -> tuple[str, bool]:
    """The line for an extension, given why its import failed (None: it did not), and whether it needs mending."""
    installed = version(extension.package)
    if installed is None:
        return (
            f"{extension.package}: not installed ({extension.role}; extra `gpu`). {_capital(extension.without)}.",
            False,
        )
    if failure is None:
        return f"{extension.package} {installed}: loads ({extension.role})", False
    built = built_for_torch(extension.package)
    other_torch = "undefined symbol" in failure or (built is not None and not _same_torch(built, torch_version))
    still = f"Until then: {extension.without}."
    if not other_torch:
        return f"{extension.package} {installed}: installed, but can't be imported: {failure}. {still}", True
    built_text = f"torch {built}" if built else "another torch than that (its wheel does not say which)"
    plain = installed.partition("+")[0]
    return (
        f"{extension.package} {installed}: built for {built_text}, but torch {torch_version} is installed: {failure}. "
        f"Build it again: {Path(sys.executable).name} -m pip install --force-reinstall --no-deps --no-cache-dir "
        f"--no-build-isolation --no-binary {extension.package} {extension.package}=={plain}\n    {still}"
    ), True


def _same_torch(built: str, here: str | None) -> bool:
    return here is not None and here.split(".")[:2] == built.split(".")[:2]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def check_packages() -> tuple[list[str], list[str]]:
    """Lines on Python and the required packages, and what is wrong with them."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return [], [f"packaging is missing: {_pip()} {_install('packaging')}"]
    packages, problems = [f"python {platform.python_version()}"], []
    for found in map(Requirement, requirements()):
        installed = version(found.name)
        if installed is None:
            problems.append(f"{found.name} is missing ({found}): {_pip()} install '{found}'")
        elif not found.specifier.contains(installed, prereleases=True):
            problems.append(f"{found.name} {installed} is installed, {found} is needed: {_pip()} install '{found}'")
        else:
            packages.append(f"{found.name} {installed}")
    return [", ".join(packages), platform.platform()], problems


def requirements() -> list[str]:
    """The required packages: of the clone, or of the distribution where this one was installed as a wheel."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        return list(tomllib.loads(project.read_text())["project"]["dependencies"])
    return [text for text in metadata.requires("nvfp4_train") or [] if "extra ==" not in text]


def _install(package: str) -> str:
    """What pip is asked for: all pinned packages of the clone, or of a wheel this one."""
    lock = ROOT / "requirements.lock"
    return f"install --requirement {quote(str(lock))}" if lock.is_file() else f"install --force-reinstall {package}"


def _pip() -> str:
    return f"{Path(sys.executable).name} -m pip"


def check_recipes(capability: tuple[int, int] | None, engine: bool) -> list[str]:
    """Lines on which recipe runs how on a device of this compute capability.

    Args:
        engine: whether Transformer Engine can be imported.
    """
    recipes = sorted(path.stem for path in (ROOT / "configs" / "precision").glob("*.yaml"))
    native = native_formats(capability)
    ours = [name for name in native if name in FP8_FORMATS]
    theirs = [name for name in native if name not in (*ours, "bf16")]
    later = {
        name: since
        for name, since in NATIVE_SINCE.items()
        if (capability is None or since > capability) and name in native_formats(since)
    }
    never = [name for name in NATIVE_SINCE if name not in (*native, *later)]
    beyond = ", ".join(f"{name} from {major}.{minor}" for name, (major, minor) in later.items())
    lines = [
        f"emulated (the same numbers anywhere): {', '.join(recipes)}",
        f"native, by this package: {', '.join(ours) or 'none here'}",
        f"native, through Transformer Engine: {', '.join(theirs) or 'none here'}"
        + ("" if engine or not theirs else " once it can be imported"),
    ]
    lines += [f"compute capabilities needed natively: {beyond}"] if beyond else []
    return lines + ([f"emulated alone here: {', '.join(never)}"] if never else [])


def check_disk(folder: Path) -> tuple[list[str], list[str]]:
    """A line on the room for run folders, and what is wrong with it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free / 2**30
    problems = []
    if not os.access(existing, os.W_OK):
        problems.append(f"{existing} can't be written; set run_dir=PATH to a folder that can")
    if free < LEAST_FREE_GIB:
        problems.append(
            f"{free:.1f} GiB free for {folder}: a checkpoint takes 12 bytes a parameter and is written beside the one "
            "before it. Free some, or set run_dir=PATH"
        )
    return [f"{folder}: {free:,.1f} GiB free"], problems


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a device runs kernels built for `sm_90a` (its own generation, not newer) or `compute_90` (or newer)."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", arch)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    return built <= capability and (found[1] == "compute" or built[0] == capability[0])


def check_torch(found: Probe) -> tuple[list[str], list[str], dict[str, Any]]:
    """Lines on torch and its devices, what is wrong with them, and what the probe said."""
    if found.failure is not None:
        return (
            [],
            [f"torch can't be imported: {found.failure}. {_pip()} {_install('torch')}"],
            {},
        )
    said = json.loads(found.output)
    lines = [
        f"GPU {index}: {name}, compute capability {major}.{minor}, {size / 2**30:.0f} GiB"
        for index, (name, major, minor, size) in enumerate(said["devices"])
    ]
    if not lines:
        lines = [f"no CUDA device ({said['problem']}); everything runs on the CPU"]
    problems = []
    if not said["devices"] and said["cuda"] and shutil.which("nvidia-smi"):
        problems.append(
            f"torch {said['version']} is built for CUDA {said['cuda']} and finds no device, though a driver is there: "
            f"{said['problem']}. A driver older than CUDA {said['cuda']} is the usual cause: update it, or install a "
            "torch built for it (https://pytorch.org/get-started)"
        )
    if not said["cuda"] and shutil.which("nvidia-smi"):
        problems.append(
            f"torch {said['version']} is built without CUDA, though a GPU driver is there: install a torch built for "
            "CUDA (https://pytorch.org/get-started), or everything runs on the CPU"
        )
    for name, major, minor, _ in said["devices"]:
        if said["archs"] and not any(_runs_on(arch, (major, minor)) for arch in said["archs"]):
            problems.append(
                f"torch {said['version']} has no kernels for {name} (compute capability {major}.{minor}; it has "
                f"{', '.join(said['archs'])}): install a torch that has (https://pytorch.org/get-started)"
            )
    return lines, problems, said


def diagnose() -> int:
    """Prints everything and returns the exit code: 0 where nothing needs mending."""
    installed = [extension for extension in EXTENSIONS if version(extension.package) is not None]
    codes = [_TORCH, "import megatron.core", *(f"import {extension.module}" for extension in installed)]
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1))) as pool:
        torch_probe, megatron, *others = pool.map(probe, codes)
    failures = {extension.package: found.failure for extension, found in zip(installed, others, strict=True)}

    packages, problems = check_packages()
    devices, torch_problems, torch_said = check_torch(torch_probe)
    problems += torch_problems
    if megatron.failure is not None:
        problems.append(f"megatron.core can't be imported: {megatron.failure}")
    extensions: list[str] = []
    for extension in EXTENSIONS:
        line, broken = examine(extension, failures.get(extension.package), torch_said.get("version"))
        (problems if broken else extensions).append(line)
    capability = next(((major, minor) for _, major, minor, _ in torch_said.get("devices", [])), None)
    engine = version(ENGINE) is not None and failures[ENGINE] is None
    room, disk_problems = check_disk(Path.cwd() / "runs")
    sections = {
        "Packages": packages,
        "Extensions": extensions,
        "Devices": [*devices, f"{os.cpu_count()} CPU cores"],
        "Precision": check_recipes(capability, engine),
        "Disk": room,
        "To mend": problems + disk_problems,
    }
    for title, lines in sections.items():
        if lines:
            print(title, *(f"  {line}" for line in lines), sep="\n")
    if not sections["To mend"]:
        print("All is well.")
    return ExitCode.MISTAKE if sections["To mend"] else ExitCode.DONE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="nvfp4_train.doctor",
        description="Says what is installed, what runs on this machine, and how to mend what does not.",
        epilog="Exit codes: 0 all is well, 2 something needs mending.",
    )
    parser.parse_args(argv)
    return guarded(diagnose)


if __name__ == "__main__":
    sys.exit(main())
