"""The doctor's report: every line comes out, and what is missing is named, whatever is missing."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_dash import doctor

ROOT = Path(__file__).parents[2]
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150 * 2**30)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108, total_memory=40 * 2**30)


def fake_torch(*devices: SimpleNamespace, cuda: "str | None" = "13.0") -> SimpleNamespace:
    runtime = SimpleNamespace(
        is_available=lambda: bool(devices),
        device_count=lambda: len(devices),
        get_device_properties=lambda index: devices[index],
    )
    return SimpleNamespace(version=SimpleNamespace(cuda=cuda), cuda=runtime)


def doctor_without(*modules: str) -> "tuple[int, dict[str, dict]]":
    """Exit status and findings by subject, in a fresh interpreter where importing `modules` fails."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r})); "
        "from cute_dash.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, {finding["subject"]: finding for finding in json.loads(done.stdout)}


def test_report_without_torch_and_dsl():
    status, findings = doctor_without("torch", "cutlass", "tvm_ffi", "numpy")
    assert status == 1
    for subject in ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy"):
        assert findings[subject]["found"] == "not installed"
        assert findings[subject]["broken"]
        assert f"pip install {subject}" in findings[subject]["limit"]
    assert "torch" in findings["GPU"]["limit"]
    assert findings["Python"]["found"].startswith(sys.version.split()[0])


def test_module_that_raises_on_import_is_reported(tmp_path, monkeypatch):
    (tmp_path / "damaged.py").write_text("raise OSError('libfoo.so.1: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    imported, finding = doctor._import("damaged", "damaged-package", "Nothing works.")
    assert imported is None
    assert finding.broken
    assert finding.limit == "OSError: libfoo.so.1: cannot open shared object file. Nothing works."


def test_missing_dependency_of_an_installed_module_is_not_called_missing_itself(tmp_path, monkeypatch):
    (tmp_path / "dependent.py").write_text("import a_module_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    _, finding = doctor._import("dependent", "dependent-package", "Nothing works.")
    assert "importing it fails" in finding.found
    assert "a_module_that_nobody_has" in finding.limit


@pytest.mark.parametrize(
    ("torch", "found", "limit"),
    [
        (fake_torch(cuda=None), "no CUDA", "build without CUDA"),
        (fake_torch(), "none", "sees no GPU"),
        (fake_torch(A100), "NVIDIA A100, sm_80, 108 SMs, 40 GiB", "refused on NVIDIA A100"),
        (fake_torch(H200), "NVIDIA H200, sm_90, 132 SMs, 150 GiB", None),
        (None, "unknown", "torch"),
    ],
    ids=["cpu-build", "no-gpu", "a100", "h200", "no-torch"],
)
def test_gpu_finding(torch, found, limit):
    (finding,) = doctor._gpus(torch)
    assert found in finding.found
    if limit is None:
        assert finding.limit == ""
    else:
        assert limit in finding.limit


def test_each_gpu_of_a_mixed_machine_has_its_own_finding():
    findings = doctor._gpus(fake_torch(H200, A100))
    assert [finding.subject for finding in findings] == ["GPU 0", "GPU 1"]
    assert [bool(finding.limit) for finding in findings] == [False, True]


def test_broken_cuda_runtime_is_reported():
    torch = fake_torch(H200)

    def raise_error(index):
        raise RuntimeError("CUDA driver initialization failed")

    torch.cuda.get_device_properties = raise_error
    (finding,) = doctor._gpus(torch)
    assert "CUDA driver initialization failed" in finding.limit


@pytest.mark.parametrize(
    ("version", "tested"), [("4.8.0", False), ("4.8.1", True), ("4.8.7", True), ("4.9.0", False), ("5.0", False)]
)
@pytest.mark.skipif(sys.platform != "linux", reason="the DSL exists for Linux only")
def test_untested_dsl_version_is_named(monkeypatch, version, tested):
    monkeypatch.setattr(doctor, "_import", lambda *_: (None, doctor.Finding("nvidia-cutlass-dsl", version)))
    monkeypatch.setattr(doctor, "_version", lambda distribution: version)
    finding = doctor._dsl()
    assert finding.found.startswith(version)
    assert finding.broken is not tested
    assert ("not tested" in finding.limit) is not tested


def test_dsl_range_is_that_of_the_package():
    requirement = re.search(r'"nvidia-cutlass-dsl>=([\d.]+),<([\d.]+);', (ROOT / "pyproject.toml").read_text())
    assert tuple(doctor._numbers(version) for version in requirement.groups()) == doctor.DSL_RANGE


def test_every_extra_that_the_doctor_recommends_exists():
    sources = [(ROOT / "cute_dash" / name).read_text() for name in ("doctor.py", "cli.py")]
    extras = set(re.findall(r"install_command\('(\w+)'\)", "".join(sources)))
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert extras
    assert extras <= set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


def test_cache_folder(tmp_path, monkeypatch):
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(blocked / "cute-dash"))
    assert "cannot be written" in doctor._cache_folder().limit
    monkeypatch.setenv("CUTE_DASH_CACHE_DIR", str(tmp_path / "new"))
    assert doctor._cache_folder() == doctor.Finding("kernel cache", f"{tmp_path / 'new'} (0 kernels)")
    monkeypatch.setenv("CUTE_DASH_CACHE", "0")
    assert "CUTE_DASH_CACHE=0" in doctor._cache_folder().limit


def test_extras_are_installed_from_the_checkout_or_from_the_index(tmp_path, monkeypatch):
    assert doctor.install_command("plot") == shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[plot]"])
    monkeypatch.setattr(doctor.cute_dash, "__file__", str(tmp_path / "cute_dash" / "__init__.py"))
    assert doctor.install_command("plot") == f"{sys.executable} -m pip install 'cute-dash[plot]'"


def test_schedules_that_cannot_be_used_are_named(monkeypatch):
    monkeypatch.setattr(doctor.registry, "load_all", lambda: ({"baseline": None}, {"bad": "schedules/bad.py: oops"}))
    finding = doctor._schedules()
    assert finding.broken and finding.found == "1 (baseline)" and "schedules/bad.py: oops" in finding.limit

    def shadowed():
        raise doctor.registry.ShadowedPackageError("another package")

    monkeypatch.setattr(doctor.registry, "load_all", shadowed)
    finding = doctor._schedules()
    assert finding.broken and "another package" in finding.limit
