"""The fused native update kernel: its build on first use, its cache, and its ctypes binding.

The library has a plain C ABI and needs no torch headers, so it compiles in seconds; ctypes releases the GIL around
every call. It lives in a folder named by a hash of everything that shaped it (source, flags, compiler, CPU), so another
CPU or compiler never loads it. Knows nothing about units or when a step may start.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import astuple, dataclass, fields
from functools import lru_cache
from pathlib import Path

import torch

from megatrain_ds.errors import MegaTrainError, explain
from megatrain_ds.optim.adam import AdamScalars, AdamStep, UpdatePart, adam_scalars
from megatrain_ds.optim.operands import check_accumulate, check_block, check_gradient, check_part, check_update
from megatrain_ds.planning.probe import usable_cpus

SOURCE_FOLDER = Path(__file__).parent / "csrc"
LIBRARY_NAME = "host_optimizer.so"

# Without -ffp-contract=off a compiler fuses products and sums of its choice, and results depend on the compiler.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-w"),
)

_ELEMENT_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


class NativeBuildError(MegaTrainError, RuntimeError):
    """The native kernel could not be compiled or loaded; the message carries the compiler's words."""


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """What `native_status` found.

    Attributes:
        built: Whether the library is compiled and loads.
        path: The library's file, or None when it could not be built.
        threads: CPUs the process may run on.
        detail: The instruction set in use, or why there is no library, in the compiler's words.
    """

    built: bool
    path: Path | None
    threads: int
    detail: str


class NativeKernel:
    """Update kernel in C++ and OpenMP, one pass over memory. Methods are described in `UpdateKernel`.

    Args:
        num_threads: Threads of every call. torch's own thread count is not touched.

    Raises:
        NativeBuildError: The library cannot be compiled or loaded.
    """

    name = "native"
    splits = True

    def __init__(self, num_threads: int, library: ctypes.CDLL | None = None) -> None:
        self._library = _default_library() if library is None else library
        self._num_threads = num_threads

    def update(
        self,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        compute: torch.Tensor | None,
        hyper: AdamStep,
        part: UpdatePart = UpdatePart.ALL,
    ) -> None:
        """Apply one Adam step, or a part of it, to flat tensors; the compute copy is written with the master."""
        check_part(part, hyper)
        compute = check_update(master, exp_avg, exp_avg_sq, grad, compute)
        failed = self._library.megatrain_adam(
            master.data_ptr(),
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            grad.data_ptr(),
            _ELEMENT_CODES[grad.dtype],
            None if compute is None else compute.data_ptr(),
            0 if compute is None else _ELEMENT_CODES[compute.dtype],
            master.numel(),
            ctypes.byref(_Coefficients(*astuple(adam_scalars(hyper)))),
            part.value,
            self._num_threads,
        )
        _require_known_types(failed)

    def accumulate(self, *, accumulator: torch.Tensor, grad: torch.Tensor, overwrite: bool) -> None:
        """Copy `grad` into `accumulator`, or add it."""
        check_accumulate(accumulator, grad)
        failed = self._library.megatrain_accumulate(
            accumulator.data_ptr(),
            _ELEMENT_CODES[accumulator.dtype],
            grad.data_ptr(),
            _ELEMENT_CODES[grad.dtype],
            grad.numel(),
            overwrite,
            self._num_threads,
        )
        _require_known_types(failed)

    def sum_of_squares(self, grad: torch.Tensor) -> float:
        """Add the squares of all elements in fp64; the result does not depend on the number of threads."""
        check_gradient(grad)
        result = ctypes.c_double()
        failed = self._library.megatrain_sum_of_squares(
            grad.data_ptr(), _ELEMENT_CODES[grad.dtype], grad.numel(), ctypes.byref(result), self._num_threads
        )
        _require_known_types(failed)
        return result.value

    def prefault(self, block: torch.Tensor) -> None:
        """Write one byte of every page with its own value, each thread in its own range."""
        check_block(block)
        self._library.megatrain_prefault(block.data_ptr(), block.numel(), self._num_threads)


def native_status() -> NativeStatus:
    """Compile and load the library if that has not happened yet, and say how it went; a failed build does not raise."""
    threads = usable_cpus()
    try:
        path = build_library()
        instruction_set = load_library(path).megatrain_instruction_set().decode()
    except NativeBuildError as error:
        return NativeStatus(built=False, path=None, threads=threads, detail=str(error))
    return NativeStatus(built=True, path=path, threads=threads, detail=f"instruction set {instruction_set}")


def build_library(extra_flags: tuple[str, ...] = ()) -> Path:
    """Return the compiled library's path, compiling it first if the cache has none.

    Written to a temporary folder and moved into place in one operation, without locks: processes that race build the
    same library twice, and a killed build leaves nothing that looks finished.

    Args:
        extra_flags: Compiler flags after the standard ones, for example to leave an instruction set out.

    Raises:
        NativeBuildError: No compiler, a failed compilation, or a cache folder that cannot be written.
    """
    compiler = _find_compiler()
    flags = (*FLAGS, *extra_flags)
    folder = cache_root() / _cache_key(compiler, flags)
    library = folder / LIBRARY_NAME
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unfinished = Path(scratch) / LIBRARY_NAME
            _run_compiler([*compiler, *flags, "-o", str(unfinished), str(SOURCE_FOLDER / "host_optimizer.cpp")])
            unfinished.replace(library)
    except OSError as error:
        raise NativeBuildError(
            explain("build folder", str(folder), f"it cannot be written ({error})", "Set TORCH_EXTENSIONS_DIR")
        ) from error
    return library


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library made by `build_library` and declare its functions.

    Raises:
        NativeBuildError: The system refuses to load it, for example for a missing OpenMP runtime.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        action = f"Install the missing library or delete {path.parent}"
        raise NativeBuildError(explain("native kernel", str(path), f"it does not load ({error})", action)) from error
    address, code, count, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32
    library.megatrain_instruction_set.restype = ctypes.c_char_p
    library.megatrain_adam.argtypes = [*[address] * 4, code, address, code, count, address, code, number]
    library.megatrain_accumulate.argtypes = [address, code, address, code, count, number, number]
    library.megatrain_sum_of_squares.argtypes = [address, code, count, address, number]
    library.megatrain_prefault.argtypes = [address, count, number]
    return library


def cache_root() -> Path:
    """Return the folder that holds every build: under TORCH_EXTENSIONS_DIR, else where torch builds its extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root) / "megatrain_ds"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions" / "megatrain_ds"


@lru_cache(maxsize=1)
def _default_library() -> ctypes.CDLL:
    return load_library(build_library())


def _find_compiler() -> list[str]:
    """Return the compiler command: CXX (which may carry arguments) or the first of g++ and c++ on the path."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command
    for name in ("g++", "c++"):
        if shutil.which(name):
            return [name]
    rule = "no C++ compiler was found on the path"
    raise NativeBuildError(explain("CXX", None, rule, "Install g++ or set CXX to a C++17 compiler with OpenMP"))


def _run_compiler(command: list[str]) -> str:
    """Run the compiler and return what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        rule = f"the compiler does not start ({error})"
        raise NativeBuildError(explain("CXX", command[0], rule, "Install g++ or correct CXX")) from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        rule = f"exit status {done.returncode}; the compiler says:\n{words}\n"
        action = "Install a g++ with C++17 and OpenMP (Debian: apt install g++), or set CXX to one"
        raise NativeBuildError(explain("compiler command", shlex.join(command), rule, action))
    return done.stdout


def _cache_key(compiler: list[str], flags: tuple[str, ...]) -> str:
    """Hash what shapes the machine code: source, flags, compiler and its version, and this CPU's features."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.iterdir()):
        digest.update(source.read_bytes())
    for part in (*compiler, *flags, _run_compiler([*compiler, "--version"]), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu_identity() -> str:
    """Describe the CPU as far as `-march=native` looks at it: model and feature flags."""
    identity = [platform.machine(), platform.processor()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first_cpu = cpuinfo.read_text(errors="replace").split("\n\n")[0]
        wanted = ("model name", "flags", "features", "cpu part", "cpu implementer")
        identity += [line for line in first_cpu.splitlines() if line.lower().startswith(wanted)]
    return "\n".join(identity)


def _require_known_types(failed: int) -> None:
    # The checks allow exactly the combinations that are compiled in; a non-zero status means the two have drifted.
    if failed:
        rule = "the native kernel has no code for this combination of dtypes"
        raise TypeError(explain("status", failed, rule, "Report it, with the dtypes of the arguments"))


class _Coefficients(ctypes.Structure):
    """Mirror of MegatrainAdamCoefficients in host_optimizer.cpp."""

    _fields_ = [
        (field.name, ctypes.c_int32 if field.name == "decay_mode" else ctypes.c_float) for field in fields(AdamScalars)
    ]
