"""Folders and files that appear whole or not at all.

[Note: How a save replaces an older one]
A folder is filled under a temporary sibling name, its files are on the disk, and only then it takes the final name. An
older folder of that name changes places with it in one system call, so at every moment the name shows a complete
folder. Where the file system cannot exchange, the older one is set aside first; a kill right then leaves it under the
name that `recover` gives back. Whatever a killed save leaves under a temporary name is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SAVING = ".megatrain-saving"
PREVIOUS = ".megatrain-previous"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def replacing_folder(target: Path, *, is_replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Fill a temporary folder in the body; at its end it becomes `target`.

    Args:
        target: the folder to make or to replace; missing parents are made.
        is_replaced: whether an entry of an older `target`, by name, goes with it. Others are kept.

    Yields:
        The empty temporary folder, on the same file system.

    An exception in the body removes the temporary folder and leaves an older `target` as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    recover(target)
    temporary = _sibling(target, SAVING)
    temporary.mkdir()
    try:
        yield temporary
        if target.is_dir():
            _keep_others(target, temporary, is_replaced)
        sync_folder(temporary)
        _put_in_place(temporary, target)
    finally:
        # After an exchange this is the older folder.
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(target.parent)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Write a temporary file in the body; at its end it becomes `path`, which is as it was if the body raises."""
    temporary = _sibling(path, SAVING)
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Give a small file new content in one step."""
    with replacing_file(path) as temporary, temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def recover(target: Path) -> None:
    """Give `target` back what a killed save had set aside; see "How a save replaces an older one"."""
    previous = _sibling(target, PREVIOUS)
    if previous.is_dir():
        if target.exists():
            shutil.rmtree(previous, ignore_errors=True)
        else:
            previous.rename(target)


def sync_folder(folder: Path) -> None:
    """Have the system put the folder's names on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems refuse it for folders; names are then as safe as they make them.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Let two names of one file system change places in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0


def _put_in_place(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
    elif not exchange(temporary, target):
        set_aside(temporary, target)


def set_aside(temporary: Path, target: Path) -> None:
    """Replace `target` by `temporary` in two steps, for file systems that cannot exchange."""
    previous = _sibling(target, PREVIOUS)
    target.rename(previous)
    temporary.rename(target)
    shutil.rmtree(previous, ignore_errors=True)


def _keep_others(target: Path, temporary: Path, is_replaced: Callable[[str], bool]) -> None:
    for entry in target.iterdir():
        if is_replaced(entry.name) or (temporary / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, temporary / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, temporary / entry.name, follow_symlinks=False)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(f".*{SAVING}"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")
