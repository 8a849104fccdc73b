"""`megatrain-ds doctor`: whether the plugin is active, what it would run on, and what is in the way.

Every finding says what to do. Findings that only cost speed are notes; the exit status is 1 only when an ordinary
script would not get a working engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from megatrain_ds.planning.probe import available_host_bytes, memlock_limit_bytes, usable_cpus

_GIB = 1024**3


@dataclass
class Diagnosis:
    """What the doctor found.

    Attributes:
        facts: Section -> values, the content of `--json`.
        problems: What keeps a script from running, with the next action.
        notes: What costs speed or is untested, with the next action.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Whether an ordinary script gets a working engine."""
        return not self.problems


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; 0 when usable, 1 when not."""
    diagnosis = diagnose()
    print(_as_json(diagnosis) if arguments.json else _as_text(diagnosis))
    return 0 if diagnosis.usable else 1


def diagnose() -> Diagnosis:
    """Look at the plugin, the versions, the native kernel, the accelerator, pinning, threads and memory."""
    diagnosis = Diagnosis()
    for examine in (_examine_plugin, _examine_accelerator, _examine_pinning, _examine_kernel, _examine_host):
        examine(diagnosis)
    return diagnosis


def _examine_plugin(diagnosis: Diagnosis) -> None:
    from megatrain_ds.plugin.report import activation_report

    report = activation_report()
    diagnosis.facts["plugin"] = {"active": report.active, "hooked": report.hooked, "why_not": list(report.reasons)}
    diagnosis.facts["versions"] = {check.package: asdict(check) for check in report.versions}
    diagnosis.problems += report.reasons
    for check in report.versions:
        if check.installed is None and check.package in ("torch", "deepspeed"):
            diagnosis.problems.append(f"{check.describe()}. Install it.")
        elif not check.inside:
            diagnosis.notes.append(f"{check.describe()}: outside the tested range.")


def _examine_accelerator(diagnosis: Diagnosis) -> None:
    try:
        from deepspeed.accelerator import get_accelerator

        accelerator: Any = get_accelerator()
        name, count = accelerator.device_name(), accelerator.device_count()
    except Exception as error:
        diagnosis.facts["accelerator"] = {"name": None, "devices": 0, "detail": repr(error)}
        diagnosis.problems.append(f"accelerator: {error}. Repair the DeepSpeed or driver installation.")
        return
    diagnosis.facts["accelerator"] = {"name": name, "devices": count, "detail": accelerator.__class__.__name__}
    if name == "cpu":
        diagnosis.notes.append("accelerator: cpu. Everything runs, but nothing is gained over plain PyTorch.")


def _examine_pinning(diagnosis: Diagnosis) -> None:
    """Pinning needs CUDA; the memlock limit is stated because containers set it low."""
    try:
        import torch

        cuda = torch.cuda.is_available()
    except Exception as error:
        diagnosis.problems.append(f"torch cannot be imported: {error}. Repair its installation.")
        cuda = False
    limit = memlock_limit_bytes()
    allowed, detail = _try_pinning() if cuda else (False, "no CUDA device, host memory stays pageable")
    diagnosis.facts["pinning"] = {"allowed": allowed, "memlock_limit_bytes": limit, "cuda": cuda, "detail": detail}
    if cuda and not allowed:
        diagnosis.notes.append(
            f'pinning: {detail}. Raise the limit ("ulimit -l unlimited") or set "megatrain": {{"pin_memory": false}}.'
        )


def _try_pinning() -> tuple[bool, str]:
    import torch

    try:
        pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError as error:
        return False, str(error).splitlines()[0]
    return pinned, "one MiB was pinned" if pinned else "the system returned pageable memory"


def _examine_kernel(diagnosis: Diagnosis) -> None:
    try:
        status = importlib.import_module("megatrain_ds.optim.native").native_status()
    except Exception as error:
        diagnosis.facts["native_kernel"] = {"built": False, "path": None, "threads": None, "detail": repr(error)}
        diagnosis.problems.append(f"native kernel: cannot be examined: {error}. Reinstall the package.")
        return
    facts = {name: getattr(status, name) for name in ("built", "path", "threads", "detail")}
    facts["path"] = None if facts["path"] is None else str(facts["path"])
    diagnosis.facts["native_kernel"] = facts
    if not status.built:
        diagnosis.notes.append(f"native kernel: not built: {status.detail}")


def _examine_host(diagnosis: Diagnosis) -> None:
    usable = usable_cpus()
    diagnosis.facts["host"] = {
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "available_bytes": available_host_bytes(),
    }
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) < usable:
        diagnosis.notes.append(
            f"OMP_NUM_THREADS = {threads}: below the {usable} usable cores. "
            'Unset it, or set "megatrain": {"update_threads": ...}, for a faster host update.'
        )


def _as_json(diagnosis: Diagnosis) -> str:
    content = {"usable": diagnosis.usable, "problems": diagnosis.problems, "notes": diagnosis.notes, **diagnosis.facts}
    return json.dumps(content, indent=2)


def _as_text(diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    host, pinning, kernel, accelerator = (facts[name] for name in ("host", "pinning", "native_kernel", "accelerator"))
    limit = pinning["memlock_limit_bytes"]
    lines = [
        f"plugin         {'active' if facts['plugin']['active'] else 'NOT active'}",
        *(_version_line(check) for check in facts["versions"].values()),
        f"accelerator    {accelerator['name']}, {accelerator['devices']} device(s)",
        f"pinning        {'allowed' if pinning['allowed'] else 'not used'}: {pinning['detail']}; "
        f"memlock limit {'unlimited' if limit is None else f'{limit / _GIB:.2f} GiB'}",
        f"native kernel  {'built' if kernel['built'] else 'not built'}, {kernel['threads']} thread(s): "
        f"{kernel['path'] or kernel['detail']}",
        f"host           {host['usable_cores']} of {host['cores']} cores, "
        f"{host['available_bytes'] / _GIB:.1f} GiB available",
        *(f"note: {note}" for note in diagnosis.notes),
        *(f"problem: {problem}" for problem in diagnosis.problems),
        "usable" if diagnosis.usable else "NOT usable",
    ]
    return "\n".join(lines)


def _version_line(check: dict[str, Any]) -> str:
    mark = "" if check["inside"] else "  OUTSIDE"
    installed = check["installed"] or "not installed"
    return f"{check['package']:<14} {installed} (supported from {check['oldest']}, tested to {check['newest']}){mark}"
