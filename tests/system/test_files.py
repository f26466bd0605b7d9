"""Files that users name: whole or not at all, through links, with their mode; pipes and devices as they are; locks."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE, ROOT, deadline, python, small_files

from minidl.system import files
from minidl.system.files import FileError, Growing, check_writable, claimed, read, read_text, write_atomic
from minidl.training import checkpoint


def refused(act: Any, *mentions: str) -> str:
    with deadline(), pytest.raises(FileError) as caught:
        act()
    line = str(caught.value)
    assert "\n" not in line
    for mention in mentions:
        assert mention in line, line
    return line


def killed(code: str) -> None:
    """Runs a program that kills itself."""
    assert python("-c", code).returncode == -signal.SIGKILL


# -------------------------------------------------------------------------------------------------------------- writing
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_a_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.csv"
    path.write_text("old")
    path.chmod(mode)
    write_atomic(path, "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", mode)


def test_a_new_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "new", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, chain, dangling = (tmp_path / "far" / "file", tmp_path / "link", tmp_path / "chain",
                                     tmp_path / "dangling")
    target.write_text("old")
    link.symlink_to(target)
    chain.symlink_to("link")
    dangling.symlink_to("far/made")
    write_atomic(chain, "new")
    write_atomic(dangling, "made")
    assert link.is_symlink()
    assert chain.is_symlink()
    assert dangling.is_symlink()
    assert (target.read_text(), (tmp_path / "far" / "made").read_text()) == ("new", "made")
    assert sorted(os.listdir(tmp_path / "far")) == ["file", "made"]


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(lambda: write_atomic(tmp_path / "loop", "x"), str(tmp_path / "loop"), "symbolic links")


@pytest.mark.parametrize("content", [b"", b"few", os.urandom(300_000)])
def test_a_pipe_is_written_to_and_stays(tmp_path: Path, content: bytes) -> None:
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()))
    reader.start()
    with deadline():
        write_atomic(path, content)
        reader.join()
    assert got == [content]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_pipe_that_nobody_reads_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "READER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: write_atomic(tmp_path / "pipe", "x"), "nobody reads")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_pipe_whose_reader_goes_away_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)

    def read_little() -> None:
        with open(path, "rb") as file:
            file.read(10)

    reader = threading.Thread(target=read_little)
    reader.start()
    refused(lambda: write_atomic(path, bytes(10_000_000)), str(path), "Broken pipe")
    reader.join()


def test_standard_output_is_not_replaced(tmp_path: Path) -> None:
    code = ("from minidl.system.files import write_atomic; print('before'); write_atomic('/dev/stdout', 'content\\n'); "
            "print('after')")
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, timeout=PATIENCE)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, timeout=PATIENCE)
    assert done.stdout == b"before\ncontent\nafter\n"


def test_a_record_is_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    log = Growing(path, anew=False)
    log.write(b"first\n")
    with small_files(15):
        refused(lambda: log.write(b"a record that is too long\n"), str(path), "too large")
    log.write(b"next\n")
    assert path.read_bytes() == b"old\nfirst\nnext\n"
    refused(lambda: Growing(path, anew=True), str(path), "another run writes to it")
    log.close()
    Growing(path, anew=True).close()
    assert path.read_bytes() == b""


@pytest.mark.may_skip
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every file")
def test_a_file_that_must_not_be_written_to_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    path.chmod(0o400)
    refused(lambda: write_atomic(path, "new"), "no permission to write to it")
    assert path.read_text() == "old"


@pytest.mark.parametrize("act", [lambda path: write_atomic(path, "x"), check_writable])
def test_a_folder_is_refused(tmp_path: Path, act: Any) -> None:
    refused(lambda: act(tmp_path), str(tmp_path), "is a folder")
    refused(lambda: act(tmp_path / "none" / "x"), "none")


def test_names_as_long_as_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"


def test_what_a_killed_process_left_is_removed_by_the_next_save_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "plan.csv").write_text("old")
    for _ in range(3):
        killed(f"""
import os
from minidl.system import files
files.os.fsync = lambda file: os.kill(os.getpid(), 9)
files.write_atomic({str(tmp_path / "plan.csv")!r}, "half")
""")
        assert len(os.listdir(tmp_path)) == 2, "what the one before left is gone"
    (tmp_path / ".plan.csv.mine").write_text("a user's")
    (tmp_path / ".other.csv.abcdefgh.part").write_text("of another file")
    assert (tmp_path / "plan.csv").read_text() == "old"
    write_atomic(tmp_path / "plan.csv", "new")
    assert sorted(os.listdir(tmp_path)) == [".other.csv.abcdefgh.part", ".plan.csv.mine", "plan.csv"]


@pytest.mark.parametrize("when", ["link", "replace", "fsync"])
def test_what_a_run_killed_while_it_saved_left_is_removed_when_the_next_one_starts(tmp_path: Path, when: str) -> None:
    killed(f"""
import os
from minidl.system import files
from minidl.training import checkpoint
held = checkpoint.claim({str(tmp_path)!r})
held.__enter__()
at, real = {str(tmp_path)!r} + "/", files.os.{when}
files.write_atomic(at + checkpoint.NAME, "old")
def killed(*names):
    {when!r} == "replace" or real(*names)
    os.kill(os.getpid(), 9)
files.os.{when} = killed
files.copy_atomic(files.Path(at + checkpoint.NAME), files.Path(at + "step-00000003.safetensors"))
files.write_atomic(at + checkpoint.NAME, "half")
""")
    left = set(os.listdir(tmp_path))
    assert left - {checkpoint.NAME, f".{checkpoint.NAME}.lock", "step-00000003.safetensors"}, "nothing to clean"
    (tmp_path / ".best.safetensors.part").write_text("another run writes this one")
    with open(tmp_path / ".best.safetensors.part", "r+b") as other:
        files._lock(other.fileno())
        with checkpoint.claim(tmp_path):
            pass
        assert set(os.listdir(tmp_path)) - {"step-00000003.safetensors"} == {checkpoint.NAME, ".best.safetensors.part"}
    assert (tmp_path / checkpoint.NAME).read_text() == "old"


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_is_whole_and_leaves_nothing(tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: exec("raise OSError(95, 'no links here')"))
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    first.write_text("new")
    second.write_text("old")
    for _ in range(2):  # the second time both are one file
        files.copy_atomic(first, second)
    assert second.read_text() == "new"
    other.mkdir()
    refused(lambda: files.copy_atomic(first, other), "is a folder")
    assert sorted(os.listdir(tmp_path)) == ["first", "other", "second"]


def test_many_processes_write_one_file(tmp_path: Path) -> None:
    """It is always one of theirs, whole, and nothing is left."""
    code = f"""
import sys
from minidl.system.files import write_atomic
for n in range(100):
    write_atomic({str(tmp_path / "x")!r}, sys.argv[1] * 1000)
"""
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=ROOT) for name in "abc"]
    while any(w.poll() is None for w in writers):
        if (tmp_path / "x").exists():
            assert (tmp_path / "x").read_text() in {name * 1000 for name in "abc"}
    assert [w.returncode for w in writers] == [0, 0, 0]
    assert os.listdir(tmp_path) == ["x"]


# -------------------------------------------------------------------------------------------------------------- reading
def test_only_regular_files_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: read(tmp_path / "pipe", "plan"), "pipe", "not a regular file")
    refused(lambda: read("/dev/zero", "plan"), "/dev/zero", "not a regular file")
    refused(lambda: read(tmp_path, "plan"), str(tmp_path))
    refused(lambda: read(tmp_path / "none", "plan"), "No such file")


def test_a_file_larger_than_its_kind_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.toml"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room on the disk
    refused(lambda: read(path, "config"), "larger than 8 KiB")
    with open(path, "wb") as file:
        file.truncate(files.LARGEST["config"])
    assert len(read(path, "config")) == files.LARGEST["config"]


def test_text_with_a_byte_order_mark_and_any_end_of_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\rc\nd")
    assert read_text(path, "plan") == "a\nb\nc\nd"
    path.write_bytes("rank".encode("utf-16"))
    with pytest.raises(ValueError, match=r"a\.csv: not a text file in UTF-8"):
        read_text(path, "plan")


# ---------------------------------------------------------------------------------------------------------------- locks
def test_a_lock_is_held_by_one_and_goes_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    code = f"""
import time
from pathlib import Path
from minidl.system.files import claimed
with claimed(Path({str(lock)!r})):
    print("held", flush=True)
    time.sleep(3600)
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        refused(lambda: claimed(lock).__enter__(), "another process")
        holder.kill()
    with claimed(lock):
        refused(lambda: claimed(lock).__enter__(), "another process")
    assert not lock.exists()
    with claimed(lock):
        assert lock.exists()


def test_a_lock_is_never_held_twice(tmp_path: Path) -> None:
    """Threads take and leave it as fast as they can; a lock of this kind belongs to the open file, so threads exclude
    each other as processes do."""
    held, twice, taken = [0], [0], [0]

    def work() -> None:
        for _ in range(300):
            try:
                with claimed(tmp_path / ".lock"):
                    held[0] += 1
                    twice[0] += held[0] > 1
                    taken[0] += 1
                    held[0] -= 1
            except FileError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert twice[0] == 0
    assert taken[0] > 0
    assert not os.listdir(tmp_path)


def test_an_interrupt_after_the_rename_stays_one(tmp_path, monkeypatch):
    """It is no error of a file that nobody finds."""
    replace, path = os.replace, tmp_path / "record"

    def interrupted(source, target):
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.write_atomic(path, "new")
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]
