"""The native kernel's build: cache, races, failures and what they say, and every instruction set's results."""

from __future__ import annotations

import os
import platform
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatrain_ds.errors import MegaTrainWarning
from megatrain_ds.optim import native
from megatrain_ds.optim.adam import AdamStep
from megatrain_ds.optim.kernel import load_kernel
from megatrain_ds.planning.probe import usable_cpus

HYPER = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, bias_correction=True, step=2, grad_scale=0.5)


@pytest.fixture
def build_root(tmp_path, monkeypatch):
    """An empty cache, and no library remembered from other tests."""
    root = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    native._default_library.cache_clear()
    yield root
    native._default_library.cache_clear()


@pytest.fixture
def use_compiler(tmp_path, monkeypatch):
    """Make CXX a shell script with the given text."""

    def use(text):
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))

    return use


def files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_a_build_is_cached_and_reused(build_root, use_compiler, tmp_path):
    log = tmp_path / "log"
    use_compiler(f'echo "$@" >> {log}; exec g++ "$@"')
    first = native.build_library()
    assert first.parent.parent == build_root / "megatrain_ds"
    assert native.build_library() == first
    compilations = [line for line in log.read_text().splitlines() if "-O3" in line]
    assert len(compilations) == 1
    assert files(build_root) == [first]
    assert load_kernel("native").name == "native"
    status = native.native_status()
    assert (status.built, status.path) == (True, first)
    assert status.threads == usable_cpus()
    assert status.detail.startswith("instruction set ")


def test_another_cpu_compiler_or_flag_is_another_library(build_root, use_compiler, monkeypatch):
    command, flags = ["g++"], native.FLAGS
    keys = {native._cache_key(command, flags), native._cache_key(command, (*flags, "-g"))}
    use_compiler('[ "$1" = --version ] && echo "another compiler 1.0"')
    keys.add(native._cache_key([os.environ["CXX"]], flags))
    monkeypatch.setattr(native, "_cpu_identity", lambda: "flags: sse2")
    keys.add(native._cache_key(command, flags))
    assert len(keys) == 4


def test_the_default_cache_is_where_torch_builds_its_extensions(monkeypatch):
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    assert native.cache_root().resolve() == (Path(get_default_build_root()) / "megatrain_ds").resolve()


def test_builds_that_race_share_no_file_and_leave_one_library(build_root, use_compiler, tmp_path):
    finished = tmp_path / "finished"
    # Each compilation returns only when both have written their output.
    wait_for_both = f"for i in $(seq 600); do [ $(wc -l < {finished}) -ge 2 ] && exit 0; sleep 0.05; done; exit 1"
    use_compiler(f'[ "$1" = --version ] && exec g++ "$@"; g++ "$@" || exit; echo >> {finished}; {wait_for_both}')
    with ThreadPoolExecutor(2) as pool:
        racers = [pool.submit(native.build_library) for _ in range(2)]
    paths = {racer.result() for racer in racers}
    assert files(build_root) == sorted(paths)
    assert len(paths) == 1
    assert native.load_library(paths.pop()).megatrain_instruction_set()


def test_a_failed_compilation_falls_back_once_with_the_compilers_words(build_root, use_compiler):
    use_compiler('[ "$1" = --version ] && exit 0; echo "fatal: the moon is full" >&2; exit 3')
    with pytest.raises(native.NativeBuildError, match="exit status 3; the compiler says:\nfatal: the moon is full"):
        native.build_library()
    assert files(build_root) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = load_kernel("native")
    assert kernel.name == "torch"
    (warning,) = caught
    assert issubclass(warning.category, MegaTrainWarning)
    assert warning.filename == __file__
    assert "fatal: the moon is full" in str(warning.message)
    assert "set CXX" in str(warning.message)
    status = native.native_status()
    assert (status.built, status.path) == (False, None)
    assert "fatal: the moon is full" in status.detail


def test_no_compiler_is_said(build_root, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(native.NativeBuildError, match=r"CXX = None: no C\+\+ compiler was found.*Install g\+\+"):
        native.build_library()
    monkeypatch.setenv("CXX", "/nowhere/clang --flag")
    with pytest.raises(native.NativeBuildError, match="CXX = '/nowhere/clang': the compiler does not start"):
        native.build_library()


def test_a_compiler_without_openmp_is_refused(build_root):
    with pytest.raises(native.NativeBuildError, match="needs OpenMP: compile with -fopenmp"):
        native.build_library(("-fno-openmp",))


def test_a_cache_that_cannot_be_written_is_said(build_root):
    build_root.write_text("a file where the folder should be")
    with pytest.raises(native.NativeBuildError, match="build folder = .*cannot be written.*Set TORCH_EXTENSIONS_DIR"):
        native.build_library()


def test_a_damaged_library_is_said(tmp_path):
    library = tmp_path / native.LIBRARY_NAME
    library.write_bytes(b"not a library")
    with pytest.raises(native.NativeBuildError, match="does not load .* or delete"):
        native.load_library(library)


# ---- instruction sets ----

WITHOUT_AVX512 = ("-mno-avx512f",)
WITHOUT_AVX = ("-mno-avx512f", "-mno-avx2", "-mno-avx", "-mno-fma", "-mno-f16c")


def cpu_has(*features):
    cpuinfo = Path("/proc/cpuinfo")
    line = next((x for x in cpuinfo.read_text().splitlines() if x.startswith("flags")), "") if cpuinfo.exists() else ""
    return set(features) <= set(line.split())


@pytest.fixture(scope="module")
def load_with(tmp_path_factory):
    """Build with extra flags into a cache of this module."""
    root = tmp_path_factory.mktemp("extensions")

    def load(*extra_flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(root))
            return native.load_library(native.build_library(extra_flags))

    return load


def test_the_widest_instruction_set_of_this_cpu_is_used(load_with):
    expected = "portable"
    if cpu_has("avx2", "fma", "f16c"):
        expected = "avx512" if cpu_has("avx512f", "avx512bw", "avx512vl") else "avx2"
    assert load_with().megatrain_instruction_set().decode() == expected


def outcome(library, grad_dtype, compute_dtype, numel=4099):
    """Everything a library computes from fixed inputs, infinities, NaN and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(numel, generator=generator) for name in ("master", "exp_avg", "exp_avg_sq", "grad")}
    tensors["exp_avg_sq"].abs_()
    tensors["master"][::7] *= 1e-6
    tensors["master"][::11] *= 1e-40
    tensors["master"][::13] *= 1e38
    tensors["grad"][::101], tensors["grad"][::103] = float("inf"), float("nan")
    tensors["grad"] = tensors["grad"].to(grad_dtype)
    tensors["compute"] = torch.zeros(numel, dtype=compute_dtype)
    kernel = native.NativeKernel(2, library)
    kernel.update(**tensors, hyper=HYPER)
    sums = tensors["grad"].clone()
    kernel.accumulate(accumulator=sums, grad=tensors["compute"].to(grad_dtype), overwrite=False)
    return [tensors["master"], tensors["exp_avg"], tensors["exp_avg_sq"], tensors["compute"].float(), sums.float()]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="leaves out x86 instruction sets")
def test_every_instruction_set_gives_the_same_bits(load_with):
    widest, narrower, portable = load_with(), load_with(*WITHOUT_AVX512), load_with(*WITHOUT_AVX)
    assert portable.megatrain_instruction_set() == b"portable"
    for dtype in (torch.bfloat16, torch.float16):
        expected = outcome(widest, dtype, dtype)
        for library in (narrower, portable):
            for actual, reference in zip(outcome(library, dtype, dtype), expected, strict=True):
                torch.testing.assert_close(actual, reference, rtol=0, atol=0, equal_nan=True)
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        grad = patterns.view(dtype)
        for library in (widest, narrower, portable):
            accumulator = torch.empty(grad.numel())
            native.NativeKernel(1, library).accumulate(accumulator=accumulator, grad=grad, overwrite=True)
            torch.testing.assert_close(accumulator, grad.float(), rtol=0, atol=0, equal_nan=True)
            total = native.NativeKernel(2, library).sum_of_squares(grad.nan_to_num(0, 0, 0))
            assert total == pytest.approx(float(grad.nan_to_num(0, 0, 0).double().square().sum()), rel=1e-12)
