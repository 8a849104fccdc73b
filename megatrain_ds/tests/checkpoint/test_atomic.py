"""Folders appear whole or not at all: at every instant a kill can come, on an exception, and after leftovers."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

import pytest

from megatrain_ds.checkpoint import atomic
from megatrain_ds.checkpoint.atomic import PREVIOUS, SAVING, recover, replace_file, replacing_folder, set_aside

# What a save does to the file system; the exchange, a foreign call, lies between two of them.
CHANGES_FILES = {
    "posix": {"rename", "replace", "mkdir", "rmdir", "unlink", "remove", "stat", "fsync", "open", "close"},
    "_io": {"open"},
    "io": {"open"},
}


def write(target: Path, content: str) -> None:
    """A save of two files that belong together."""
    with replacing_folder(target, is_replaced=lambda name: name.endswith("_states.pt")) as folder:
        for name in ("model_states.pt", "optim_states.pt"):
            (folder / name).write_text(content)
    replace_file(target.parent / "latest", target.name.encode())


def read(target: Path) -> set[str]:
    return {path.read_text() for path in target.glob("*_states.pt")}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def killed_at(event: int, folder: Path, exchange: bool) -> bool:
    """Save in a child that kills itself before or after its `event`-th system call; False when it lived to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(_frame: FrameType, kind: str, function: object) -> None:
            nonlocal count
            if kind in ("c_call", "c_return") and getattr(function, "__module__", None) in CHANGES_FILES:
                count += getattr(function, "__name__", "") in CHANGES_FILES[function.__module__]
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        if not exchange:
            atomic.exchange = lambda _first, _second: False
        sys.setprofile(watch)
        write(folder / "tag", "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "set aside"])
def test_a_kill_at_any_instant_leaves_a_whole_folder(tmp_path: Path, exchange: bool) -> None:
    seen: list[str] = []
    event = 1
    while True:
        folder = tmp_path / str(event)
        write(folder / "tag", "old")
        killed = killed_at(event, folder, exchange)
        if exchange:
            assert (folder / "tag").is_dir(), event
        recover(folder / "tag")
        content = read(folder / "tag")
        assert content in ({"old"}, {"new"}), event
        assert len(list((folder / "tag").iterdir())) == 2
        assert (folder / "latest").read_text() == "tag"
        seen.extend(content)
        write(folder / "tag", "next")
        assert hidden(folder) == []
        if not killed:
            break
        event += 1
    # Both outcomes were met, the change came once, and the loop really walked through a save.
    assert event > 30
    assert seen == sorted(seen, key=["old", "new"].index)
    assert {"old", "new"} == set(seen)


def test_an_exception_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    def interrupted() -> None:
        with replacing_folder(tmp_path / "tag", is_replaced=bool) as folder:
            (folder / "model_states.pt").write_text("half")
            raise KeyboardInterrupt

    write(tmp_path / "tag", "old")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read(tmp_path / "tag") == {"old"}
    assert hidden(tmp_path) == []


def test_leftovers_of_killed_saves_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".other{SAVING}").mkdir()
    (tmp_path / f".other{SAVING}" / "huge").write_text("x")
    (tmp_path / f".latest{SAVING}").write_text("x")
    (tmp_path / ".mine").mkdir()
    write(tmp_path / "tag", "new")
    assert hidden(tmp_path) == [".mine"]


def test_files_of_other_people_stay_in_a_replaced_folder(tmp_path: Path) -> None:
    write(tmp_path / "tag", "old")
    (tmp_path / "tag" / "stale_optim_states.pt").write_text("old")
    (tmp_path / "tag" / "notes.txt").write_text("mine")
    (tmp_path / "tag" / "sub").mkdir()
    (tmp_path / "tag" / "sub" / "a").write_text("b")
    write(tmp_path / "tag", "new")
    assert read(tmp_path / "tag") == {"new"}
    assert (tmp_path / "tag" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "tag" / "sub" / "a").read_text() == "b"


def test_recover_prefers_the_complete_new_folder(tmp_path: Path) -> None:
    write(tmp_path / "tag", "new")
    write(tmp_path / f".tag{PREVIOUS}", "old")
    recover(tmp_path / "tag")
    assert read(tmp_path / "tag") == {"new"}
    assert hidden(tmp_path) == []


def test_set_aside_replaces(tmp_path: Path) -> None:
    write(tmp_path / "tag", "old")
    write(tmp_path / "made", "new")
    set_aside(tmp_path / "made", tmp_path / "tag")
    assert read(tmp_path / "tag") == {"new"}
    assert hidden(tmp_path) == []
