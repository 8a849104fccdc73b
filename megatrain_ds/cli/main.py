"""The `megatrain-ds` command line: finds the subcommand and runs it.

Knows each subcommand by the name of its module, which has `add_arguments(parser)` and `run(arguments) -> int`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "doctor": ("megatrain_ds.cli.doctor", "say whether the plugin is active here, and why not"),
    "compare": ("megatrain_ds.cli.compare", "run your own training command with the flag and without, and compare"),
    "demo": ("megatrain_ds.cli.demo", "train a small model with the flag and without, and compare the losses"),
}
"""Name -> (module, one line of help). Only the module that is asked for is imported."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Arguments after the program's name; None reads those of the process.

    Returns:
        The exit status.
    """
    words, program = _split_program(list(sys.argv[1:] if argv is None else argv))
    arguments = _build_parser(words).parse_args(words)
    arguments.program = program
    return import_module(COMMANDS[arguments.command][0]).run(arguments)


def _split_program(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the words of `compare` from those of the command after the first "--", which may hold any."""
    if words[:1] != ["compare"] or "--" not in words:
        return words, []
    end = words.index("--")
    return words[:end], words[end + 1 :]


def _build_parser(words: list[str]) -> argparse.ArgumentParser:
    """Build the parser; the options of a subcommand are added only if it is named in `words`."""
    from megatrain_ds import __version__

    parser = argparse.ArgumentParser(prog="megatrain-ds", description="Streams models through the GPU for DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line, description=line)
        if name in words:
            import_module(module).add_arguments(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
