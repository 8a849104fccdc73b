"""What an installed package does to programs that never name it."""

from __future__ import annotations

import pytest

from megatrain_ds.tests.programs import read_result, run_program

LOOK = """
import json, sys
import deepspeed
engine, init = deepspeed.DeepSpeedEngine, deepspeed.zero.Init
print("RESULT " + json.dumps({
    "engine": "__new__" in vars(engine),
    "init": "__new__" in vars(init),
    "imported": "megatrain_ds" in sys.modules,
    "finders": [type(finder).__module__ for finder in sys.meta_path if "megatrain" in type(finder).__module__],
    "loader": type(sys.modules["deepspeed.runtime.engine"].__loader__).__name__,
    "left": "exec_module" in vars(sys.modules["deepspeed.runtime.engine"].__loader__),
}))
"""


def test_plain_import_of_deepspeed_has_the_hooks(installed):
    assert read_result(run_program(LOOK, installed)) == {
        "engine": True,
        "init": True,
        "imported": True,
        "finders": [],
        "loader": "SourceFileLoader",
        "left": False,
    }


def test_pytorchs_switch_keeps_it_out(installed):
    found = read_result(run_program(LOOK, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert (found["engine"], found["init"], found["imported"]) == (False, False, False)


@pytest.mark.parametrize("first", ["megatrain_ds, deepspeed", "deepspeed, megatrain_ds"])
def test_importing_the_package_activates_without_the_entry_point(installed, first):
    found = read_result(run_program(f"import {first}\n{LOOK}", installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert (found["engine"], found["init"], found["finders"]) == (True, True, [])


def test_import_torch_alone_stays_light(installed):
    source = """
import json, sys, torch
heavy = [name for name in ("deepspeed", "pydantic", "megatrain_ds.config") if name in sys.modules]
print("RESULT " + json.dumps([heavy, "megatrain_ds" in sys.modules]))
"""
    assert read_result(run_program(source, installed)) == [[], True]


def test_the_package_imports_without_torch(installed):
    source = """
import json, sys, megatrain_ds
print("RESULT " + json.dumps([name for name in ("torch", "deepspeed", "pydantic") if name in sys.modules]))
"""
    assert read_result(run_program(source, installed)) == []


def test_a_broken_hook_warns_and_leaves_deepspeed_importable(installed):
    source = f"""
import sys, types
import megatrain_ds.plugin as plugin
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "megatrain_ds.plugin.dispatch":
            raise RuntimeError("on purpose")
sys.meta_path.insert(0, Broken())
{LOOK}
"""
    finished = run_program(source, installed)
    assert read_result(finished)["engine"] is False
    assert "deepspeed.runtime.engine not hooked: RuntimeError: on purpose" in finished.stderr


def test_the_wheel_holds_sources_and_no_tests(installed):
    package = installed / "megatrain_ds"
    assert (package / "py.typed").exists()
    assert not (package / "tests").exists()
    assert list(package.rglob("csrc/*.cpp"))
