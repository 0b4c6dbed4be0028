"""The doctor: what is broken is named with its cause and the command that mends it, and what still runs is said."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from nvfp4_train import doctor
from nvfp4_train.doctor import EXTENSIONS, Probe, built_for_torch, check_disk, error_chain, examine, probe
from nvfp4_train.exits import ExitCode

MAMBA, CONV, ENGINE = EXTENSIONS
SYMBOL = "ImportError: selective_scan_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
TORCH = {"version": "2.11.0+cpu", "cuda": None, "devices": [], "problem": "no driver", "archs": []}


def install(folder: Path, name: str, version: str, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    """A distribution as pip leaves it behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + files.pop("METADATA", "")
    )
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("version", "files", "built"),
    [
        ("2.2.4+cu12torch2.5cxx11abifalse", {}, "2.5"),
        (
            "2.2.4",
            {"direct_url__json": '{"url": "https://x/mamba_ssm-2.2.4+cu12torch2.7cxx11abiTRUE-cp312.whl"}'},
            "2.7",
        ),
        ("2.2.4", {"METADATA": "Requires-Dist: torch==2.6.0\n"}, "2.6.0"),
        ("2.2.4", {"METADATA": "Requires-Dist: torch\n"}, None),
    ],
)
def test_an_extension_built_for_another_torch(
    version: str, files: dict[str, str], built: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "mamba-ssm", version, monkeypatch, **files)
    assert built_for_torch("mamba-ssm") == built
    line, broken = examine(MAMBA, SYMBOL, "2.11.0+cu130")
    assert broken
    words = ["2.11.0+cu130", "undefined symbol", "--no-build-isolation", "mamba-ssm==2.2.4", "model.kernels=torch"]
    words.append(f"torch {built}" if built else "another torch")
    for word in words:
        assert word in line
    assert "==2.2.4+" not in line


def test_an_extension_that_loads_or_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "causal-conv1d", "1.6.0", monkeypatch)
    assert examine(CONV, None, "2.11.0") == ("causal-conv1d 1.6.0: loads (fused causal convolution)", False)
    line, broken = examine(MAMBA, None, "2.11.0")
    assert not broken
    assert "not installed" in line
    assert "PyTorch scan" in line


def test_an_engine_that_fails_to_import_shows_the_first_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "transformer-engine", "2.20.0", monkeypatch)
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(
        "try:\n    raise OSError('libcudnn.so.9: cannot open shared object file')\n"
        "except OSError as error:\n    raise RuntimeError('Transformer Engine could not be loaded') from error\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe(f"import {ENGINE.module}")
    assert found.failure is not None
    line, broken = examine(ENGINE, found.failure, "2.11.0")
    assert broken
    for word in ("libcudnn.so.9: cannot open", "could not be loaded", "precision.backend=emulated"):
        assert word in line
    assert "Build it again" not in line, "torch is not to blame"


def test_error_chain_puts_the_last_error_first() -> None:
    text = (
        "Traceback (most recent call last):\n  File 'x', line 1\nOSError: first\n\nThe above exception was ...\n\n"
        "Traceback (most recent call last):\n  File 'y', line 2\nImportError: second\n"
    )
    assert error_chain(text) == "ImportError: second; caused by OSError: first"
    assert error_chain("Segmentation fault\n") == "Segmentation fault"
    assert error_chain("") == "no message"


def test_a_process_that_dies_is_reported() -> None:
    assert probe("import os; os.abort()").failure == "the process died of signal 6"
    assert probe("print(3)") == Probe("3\n", None)


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, problems = check_disk(tmp_path / "runs")
    assert str(tmp_path / "runs") in lines[0]
    assert problems == []
    monkeypatch.setattr(doctor, "LEAST_FREE_GIB", 10**9)
    assert "run_dir=PATH" in check_disk(tmp_path / "runs")[1][0]


def diagnosis(monkeypatch: pytest.MonkeyPatch, **answers: Probe) -> int:
    def answer(code: str) -> Probe:
        kind = "torch" if "json" in code else "megatron" if "megatron" in code else "other"
        return answers.get(kind, Probe(json.dumps(TORCH) if kind == "torch" else "", None))

    monkeypatch.setattr(doctor, "probe", answer)
    return doctor.main([])


def test_a_healthy_cpu_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnosis(monkeypatch) == ExitCode.DONE
    out = capsys.readouterr().out
    for word in ("megatron-core 0.19", "emulated", "nvfp4", "everything runs on the CPU", "All is well."):
        assert word in out


def test_a_gpu_is_named_with_what_it_multiplies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = {**TORCH, "version": "2.11.0+cu130", "cuda": "13.0", "devices": [["NVIDIA H200", 9, 0, 150 * 2**30]]}
    assert diagnosis(monkeypatch, torch=Probe(json.dumps(device), None)) == ExitCode.DONE
    out = capsys.readouterr().out
    assert "NVIDIA H200, compute capability 9.0, 150 GiB" in out
    assert "native, by this package: fp8_current, fp8_delayed, fp8_block" in out
    assert "native, through Transformer Engine: none here" in out
    assert "nvfp4 from 10.0" in out
    assert "mxfp4 from" not in out
    assert "emulated alone here: mxfp4" in out


def test_a_wheel_knows_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path, "nvfp4-train", "9.9", monkeypatch,
        METADATA="Requires-Dist: numpy>=2\nRequires-Dist: nosuch-package\nRequires-Dist: pytest; extra == 'dev'\n",
    )  # fmt: skip
    monkeypatch.setattr(doctor, "ROOT", tmp_path)  # where there is no pyproject.toml
    assert doctor.requirements() == ["numpy>=2", "nosuch-package"]
    packages, problems = doctor.check_packages()
    assert "numpy 2" in packages[0]
    assert [problem.partition(":")[0] for problem in problems] == ["nosuch-package is missing (nosuch-package)"]


def test_what_blackwell_multiplies_and_through_what() -> None:
    for engine, once in ((True, ""), (False, " once it can be imported")):
        lines = doctor.check_recipes((10, 0), engine)
        assert "native, by this package: fp8_current, fp8_delayed" in lines
        assert f"native, through Transformer Engine: mxfp8, nvfp4{once}" in lines
        assert lines[-1] == "emulated alone here: fp8_block, mxfp4"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"version": "2.11.0+cpu"}, "built without CUDA"),
        (
            {"cuda": "13.0", "problem": "The NVIDIA driver on your system is too old"},
            "driver on your system is too old",
        ),
        (
            {"cuda": "13.0", "devices": [["Old GPU", 7, 0, 2**34]], "archs": ["sm_80", "sm_90a"]},
            "has no kernels for Old",
        ),
        (
            {"cuda": "13.0", "devices": [["New GPU", 10, 0, 2**34]], "archs": ["sm_80", "sm_90"]},
            "has no kernels for New",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert diagnosis(monkeypatch, torch=Probe(json.dumps({**TORCH, **answer}), None)) == ExitCode.MISTAKE
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 9), "sm_80"), ((12, 0), "compute_90"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_kernels_run_on_later_cards_of_their_generation_or_are_compiled_there(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str
) -> None:
    device = {**TORCH, "cuda": "13.0", "devices": [["GPU", *capability, 2**34]], "archs": ["sm_70", arch]}
    assert diagnosis(monkeypatch, torch=Probe(json.dumps(device), None)) == ExitCode.DONE


def test_what_is_broken_is_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnosis(monkeypatch, torch=Probe("", "OSError: libc10.so")) == ExitCode.MISTAKE
    assert "libc10.so" in capsys.readouterr().out
    assert diagnosis(monkeypatch, megatron=Probe("", "RuntimeError: engine")) == ExitCode.MISTAKE
    assert "megatron.core can't be imported: RuntimeError: engine" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "version", lambda package: None if package == "einops" else "0.0.1")
    assert diagnosis(monkeypatch) == ExitCode.MISTAKE
    out = capsys.readouterr().out
    assert "einops is missing" in out
    assert "megatron-core 0.0.1 is installed, megatron-core==0.19.* is needed" in out
