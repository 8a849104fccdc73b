"""The architecture, held by syntax tree alone: import direction, lengths, docstrings, streams, prints, bare excepts.

Nothing of the package is imported. Each rule is a function from a module to its violations (`file:line what`), and
each is also run on a small offender, so that a rule which stops seeing anything fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatrain_ds"
MAX_MODULE_LINES = 350
MAX_FUNCTION_LINES = 60
STREAM_HOME = f"{PACKAGE}/memory/streams.py"
# Lowest first; a layer imports from lower ones, and from its own level in one direction only.
LAYERS = (
    ("errors", "config", "telemetry", "compatibility", "deepspeed_keys"),
    ("memory",),
    ("model",),
    ("runtime", "optim", "planning"),
    ("checkpoint",),
    ("engine",),
    ("plugin", "cli"),
)
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}


@dataclass(frozen=True)
class Module:
    """A source file: its path relative to the repository, its text and its syntax tree."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_test(self) -> bool:
        return "tests" in Path(self.path).parts or self.path.startswith("integration_tests/")

    @property
    def layer(self) -> str | None:
        """The first name below the package, or None for the package's own `__init__` and for other folders."""
        parts = Path(self.path).with_suffix("").parts
        if self.is_test or parts[0] != PACKAGE or parts[1] == "__init__":
            return None
        return parts[1]


@dataclass(frozen=True)
class Import:
    """One import of a name of the package: its layer, its line and whether it runs when the module is loaded."""

    layer: str
    line: int
    at_load: bool


def read_modules() -> list[Module]:
    paths = [path for folder in (PACKAGE, "integration_tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def package_imports(module: Module) -> Iterator[Import]:
    """Every import of something inside the package, wherever it stands."""
    tree = module.tree
    deferred = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        for name in imported_names(node, module):
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in LEVELS:
                yield Import(parts[1], node.lineno, id(node) not in deferred)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_names(node: ast.AST, module: Module) -> list[str]:
    """Absolute dotted names that an import statement, or `import_module("...")`, brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = Path(module.path).parent.parts
            base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names] if base == PACKAGE else [base]
    if isinstance(node, ast.Call) and called_name(node) == "import_module" and node.args:
        first = node.args[0]
        return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def called_name(node: ast.Call) -> str:
    """`f` of `f()` and of `a.b.f()`."""
    return ast.unparse(node.func).rpartition(".")[2]


def upward_imports(module: Module) -> Iterator[str]:
    if module.layer is None:
        return
    if module.layer not in LEVELS:
        yield f"{module.path}:1 {module.layer!r} has no place in LAYERS: give it one"
        return
    for found in package_imports(module):
        if LEVELS[found.layer] > LEVELS[module.layer]:
            yield f"{module.path}:{found.line} {module.layer} imports {found.layer}, which lies above it"


def eager_engine_imports(module: Module) -> Iterator[str]:
    """The plugin is loaded inside `import torch`; the engine may be imported only when one is asked for."""
    for found in package_imports(module):
        if module.layer == "plugin" and found.layer == "engine" and found.at_load:
            yield f"{module.path}:{found.line} plugin imports engine at load: import it where it is needed"


def long_modules(module: Module) -> Iterator[str]:
    lines = len(module.text.splitlines())
    if lines > MAX_MODULE_LINES:
        yield f"{module.path}:{lines} has {lines} lines, more than {MAX_MODULE_LINES}: split it by noun"


def long_functions(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{module.path}:{node.lineno} {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def missing_docstrings(module: Module) -> Iterator[str]:
    if module.text.strip() and not ast.get_docstring(module.tree):
        yield f"{module.path}:1 has no module docstring"


def bare_excepts(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{module.path}:{node.lineno} bare except: name what it catches"


def stray_streams(module: Module) -> Iterator[str]:
    """Any call whose name is Stream or ExternalStream makes one: torch.Stream, torch.cuda.Stream, an accelerator's."""
    if module.is_test or module.path == STREAM_HOME:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and called_name(node) in ("Stream", "ExternalStream"):
            yield f"{module.path}:{node.lineno} makes a stream: only {STREAM_HOME} does"


def prints(module: Module) -> Iterator[str]:
    if module.is_test or module.layer == "cli":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{module.path}:{node.lineno} prints: raise, warn or log"


Rule = Callable[[Module], Iterator[str]]
OFFENDERS: list[tuple[Rule, str, str]] = [
    (upward_imports, "memory/x.py", "from megatrain_ds.engine.build import build"),
    (upward_imports, "memory/x.py", "def f():\n    from megatrain_ds import runtime"),
    (upward_imports, "memory/x.py", "from ..runtime import slot"),
    (upward_imports, "memory/x.py", "import_module('megatrain_ds.cli.main')"),
    (upward_imports, "misc/x.py", ""),
    (eager_engine_imports, "plugin/x.py", "from megatrain_ds.engine import MegaTrainEngine"),
    (long_modules, "memory/x.py", "x = 1\n" * (MAX_MODULE_LINES + 1)),
    (long_functions, "memory/x.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    (missing_docstrings, "memory/x.py", "x = 1"),
    (bare_excepts, "memory/x.py", "try:\n    f()\nexcept:\n    pass"),
    (stray_streams, "runtime/x.py", "s = torch.cuda.Stream(device)"),
    (prints, "runtime/x.py", "print(1)"),
]
INNOCENT: list[tuple[Rule, str, str]] = [
    (upward_imports, "engine/x.py", "from megatrain_ds.memory.arena import Arena"),
    (eager_engine_imports, "plugin/x.py", "def f():\n    from megatrain_ds.engine import MegaTrainEngine"),
    (stray_streams, "memory/streams.py", "s = torch.cuda.Stream(device)"),
    (prints, "cli/x.py", "print(1)"),
]
RULES = list(dict.fromkeys(rule for rule, _, _ in OFFENDERS))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    violations = [violation for module in read_modules() for violation in rule(module)]
    assert not violations, "\n" + "\n".join(violations)


@pytest.mark.parametrize(("rule", "path", "text"), OFFENDERS)
def test_rule_sees_an_offender(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module(f"{PACKAGE}/{path}", text)))


@pytest.mark.parametrize(("rule", "path", "text"), INNOCENT)
def test_rule_passes_the_innocent(rule: Rule, path: str, text: str) -> None:
    assert not list(rule(Module(f"{PACKAGE}/{path}", text)))


def sibling_edges(modules: list[Module]) -> dict[tuple[str, str], str]:
    """Imports between different layers of one level, above the lowest, each with one place where it happens."""
    edges = {}
    for module in modules:
        for found in package_imports(module) if module.layer in LEVELS else ():
            if found.layer != module.layer and LEVELS[found.layer] == LEVELS[module.layer]:
                edges[module.layer, found.layer] = f"{module.path}:{found.line}"
    return edges


def mutual_siblings(modules: list[Module]) -> list[str]:
    edges = sibling_edges(modules)
    return [f"{place} imports {b}, and {edges[b, a]} imports {a}" for (a, b), place in edges.items() if (b, a) in edges]


def test_siblings_import_one_way() -> None:
    assert not mutual_siblings(read_modules())


def test_mutual_siblings_are_seen() -> None:
    one = Module(f"{PACKAGE}/runtime/x.py", "import megatrain_ds.optim.kernel")
    other = Module(f"{PACKAGE}/optim/x.py", "from megatrain_ds.runtime import slot")
    assert mutual_siblings([one, other])
    assert not mutual_siblings([one])


def test_example_programs_never_name_the_package() -> None:
    """They are ordinary user programs: only their ds_config chooses an engine."""
    programs = [m for m in read_modules() if "/scripts/" in m.path or m.path.endswith("/demo_script.py")]
    assert len(programs) >= 4
    for module in programs:
        assert not [name for node in ast.walk(module.tree) for name in imported_names(node, module) if PACKAGE in name]
