"""`megatrain-ds doctor`: its verdict follows from what is there, in fresh interpreters as a user has them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess

import pytest

from megatrain_ds.cli.main import COMMANDS, main
from megatrain_ds.planning import probe as machine
from megatrain_ds.tests.programs import run_program

DOCTOR = "import sys; from megatrain_ds.cli.main import main; sys.exit(main(['doctor', '--json']))"
BROKEN = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "deepspeed":
            raise ModuleNotFoundError("no deepspeed here")
sys.meta_path.insert(0, Missing())
"""


def consult(*paths, source: str = DOCTOR, **environment) -> tuple[int, dict]:
    finished = run_program(source, *paths, **environment)
    content = finished.stdout[finished.stdout.index("{") :]
    return finished.returncode, json.loads(content)


def test_an_installed_package_is_usable(installed):
    code, found = consult(installed)
    assert (code, found["usable"], found["problems"]) == (0, True, [])
    assert found["plugin"] == {"active": True, "hooked": True, "why_not": []}
    assert found["versions"]["deepspeed"]["inside"] is True
    assert found["native_kernel"]["threads"] == machine.usable_cpus()
    assert found["host"]["usable_cores"] == machine.usable_cpus()
    assert 2**28 < found["host"]["available_bytes"] < 2**50
    assert found["accelerator"]["devices"] >= 1


def test_pytorchs_switch_is_the_reason(installed):
    code, found = consult(installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert code == 1
    assert found["plugin"]["hooked"] is True
    assert found["plugin"]["active"] is False
    assert found["problems"][0].startswith("TORCH_DEVICE_BACKEND_AUTOLOAD = '0': PyTorch loads no plugins. Unset it")


def test_a_missing_entry_point_is_the_reason(installed, tmp_path):
    (tmp_path / "megatrain_ds").symlink_to(installed / "megatrain_ds")
    # Metadata found first hides that of an editable install of this tree.
    (metadata,) = installed.glob("megatrain_ds-*.dist-info")
    shutil.copytree(metadata, tmp_path / metadata.name, ignore=shutil.ignore_patterns("entry_points.txt"))
    code, found = consult(tmp_path)
    assert code == 1
    assert 'entry point "torch.backends: megatrain_ds" is missing' in found["problems"][0]
    assert "pip install ." in found["problems"][0]


def test_a_broken_deepspeed_is_the_reason(installed):
    code, found = consult(installed, source=BROKEN + DOCTOR)
    assert code == 1
    assert found["plugin"]["active"] is False
    assert any("no deepspeed here" in problem for problem in found["problems"])


def test_few_threads_are_a_note_and_no_problem(installed):
    if machine.usable_cpus() < 2:
        pytest.skip("one core")
    code, found = consult(installed, OMP_NUM_THREADS="1")
    assert code == 0
    assert any(note.startswith("OMP_NUM_THREADS = 1: below") for note in found["notes"])


def test_the_text_says_the_same(installed):
    finished = run_program(DOCTOR.replace(", '--json'", ""), installed)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = finished.stdout.splitlines()
    assert "plugin         active" in lines
    assert lines[-1] == "usable"
    for word in ("torch", "deepspeed", "accelerator", "pinning", "native kernel", "host"):
        assert any(line.startswith(word) for line in lines), word


def test_the_console_script_runs(installed):
    script = installed / "bin" / "megatrain-ds"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    finished = subprocess.run(
        [script, "--version"], env=environment, text=True, capture_output=True, check=True, timeout=60
    )
    assert finished.stdout.split() == ["megatrain-ds", "0.1.0"]


def test_the_commands_are_frozen_and_an_unknown_one_is_refused(capsys):
    assert list(COMMANDS) == ["doctor", "compare", "demo"]
    with pytest.raises(SystemExit) as caught:
        main(["trian"])
    assert caught.value.code == 2
    assert "invalid choice: 'trian'" in capsys.readouterr().err


def test_doctor_does_not_import_the_demo(installed):
    source = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "matplotlib" or name == "megatrain_ds.cli.demo":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
{DOCTOR}
"""
    code, _ = consult(installed, source=source)
    assert code == 0


def test_available_memory_is_the_least_of_kernel_and_control_groups(tmp_path, monkeypatch):
    meminfo, own = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 4000 kB\nMemAvailable: 3000 kB\n")
    own.write_text("0::/outer/inner\n3:cpu,memory:/box\n")
    v2, v1 = tmp_path / "v2", tmp_path / "v1"
    for folder, limit, use in ((v2 / "outer", "2000000", 900000), (v2 / "outer" / "inner", "max", 500000)):
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{use}\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    monkeypatch.setattr(machine, "_V2_ROOT", v2)
    monkeypatch.setattr(machine, "_V1_ROOT", v1)
    assert machine.available_host_bytes(meminfo, own) == 2000000 - 900000 + 100000
    (v1 / "box").mkdir(parents=True)
    (v1 / "box" / "memory.limit_in_bytes").write_text("600000\n")
    (v1 / "box" / "memory.usage_in_bytes").write_text("700000\n")
    (v1 / "box" / "memory.stat").write_text("total_inactive_file 0\n")
    assert machine.available_host_bytes(meminfo, own) == 0
    own.write_text("")
    assert machine.available_host_bytes(meminfo, own) == 3000 * 1024


def test_usable_cpus_are_the_least_of_affinity_and_quotas(tmp_path, monkeypatch):
    own, v2, v1 = tmp_path / "cgroup", tmp_path / "v2", tmp_path / "v1"
    own.write_text("0::/outer/inner\n3:cpu,cpuacct:/box\n2:cpuset:/other\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "_V2_ROOT", v2)
    monkeypatch.setattr(machine, "_V1_CPU_ROOT", v1)
    assert machine.usable_cpus(own) == 64
    (v2 / "outer" / "inner").mkdir(parents=True)
    (v2 / "outer" / "inner" / "cpu.max").write_text("max 100000\n")
    assert machine.usable_cpus(own) == 64
    (v2 / "outer" / "cpu.max").write_text("1650000 100000\n")
    assert machine.usable_cpus(own) == 16
    (v1 / "box").mkdir(parents=True)
    (v1 / "box" / "cpu.cfs_period_us").write_text("100000\n")
    (v1 / "box" / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.usable_cpus(own) == 16
    (v1 / "box" / "cpu.cfs_quota_us").write_text("50000\n")
    assert machine.usable_cpus(own) == 1
    assert machine.usable_cpus(tmp_path / "nowhere") == 64


@pytest.mark.parametrize("quota", ["", "max", "50000 0", "many 100000", "1 2 3"])
def test_a_quota_that_cannot_be_read_is_none(tmp_path, monkeypatch, quota):
    own, v2 = tmp_path / "cgroup", tmp_path / "v2"
    own.write_bytes(b"\n0::/box\nnonsense\n7:\xff:\xfe\n")
    (v2 / "box").mkdir(parents=True)
    (v2 / "box" / "cpu.max").write_text(quota)
    (v2 / "box" / "memory.max").write_text("")
    (v2 / "box" / "memory.current").write_text("5")
    (v2 / "box" / "memory.stat").write_text("")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "_V2_ROOT", v2)
    assert machine.usable_cpus(own) == 64
    assert machine.available_host_bytes(own_cgroup=own) > 0


def test_the_memlock_limit_is_read_in_bytes():
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert machine.memlock_limit_bytes() == (None if soft == resource.RLIM_INFINITY else soft)
