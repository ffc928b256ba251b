"""One run, one folder, one process; nothing outside."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import pytest

from hybridtrainer.errors import LockedError, RunFolderError
from hybridtrainer.run_folder import RunFolder, open_run, run_path, was_made_by_command

BAD_NAMES = [
    "", ".", "..", "../evil", "a/../../b", "/etc/cron.d/x", "a/b", "a\\b", "nul\0byte", "x" * 300, ".hidden", "-rf",
    "a..b", "new\nline", "sp ace", "ünïcode", "a\u202eb", "~root", "$(id)", "COM1:",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_could_lead_elsewhere_is_refused_and_nothing_is_written(name, tmp_path):
    with pytest.raises(RunFolderError, match="cannot be the name"):
        run_path(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run", "gpt-2_v1.5", "_x", "0", "a" * 100])
def test_an_ordinary_name_stays_inside_its_folder(name, tmp_path):
    assert run_path(tmp_path, name).parent == tmp_path


@pytest.mark.parametrize("link", ["", "checkpoints", "log.jsonl", "lock"])
def test_links_out_of_the_folder_are_refused_and_nothing_is_written_through_them(link, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    run = tmp_path / "runs" / "run"
    run.parent.mkdir()
    if link:
        run.mkdir()
        (run / link).symlink_to(outside if link == "checkpoints" else outside / "file")
    else:
        run.symlink_to(outside)
    with pytest.raises(RunFolderError, match="symbolic link"):
        RunFolder(run, keep_last=3)
    assert list(outside.iterdir()) == []


def test_of_two_runs_in_one_folder_one_wins_and_the_other_writes_nothing(tmp_path):
    with RunFolder(tmp_path / "run", keep_last=3) as folder:
        folder.write_text("config.toml", "seed = 1\n")
        before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.path.iterdir()}
        with pytest.raises(LockedError, match=str(os.getpid())):
            RunFolder(tmp_path / "run", keep_last=3, resume=True)
        assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.path.iterdir()} == before
    RunFolder(tmp_path / "run", keep_last=3).close()


def test_the_lock_of_a_killed_process_is_reclaimed(tmp_path):
    script = f"""
import time
from hybridtrainer.run_folder import RunFolder
folder = RunFolder({str(tmp_path / "run")!r}, 3)
print("locked", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "locked\n"
    with pytest.raises(LockedError, match=str(child.pid)):
        RunFolder(tmp_path / "run", keep_last=3)
    child.kill()
    child.wait()
    for _ in range(50):  # the kernel drops the lock when the process is gone
        try:
            RunFolder(tmp_path / "run", keep_last=3).close()
            break
        except LockedError:
            time.sleep(0.1)
    else:
        pytest.fail("the lock was not reclaimed")


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path):
    with RunFolder(tmp_path / "run", keep_last=3) as folder:
        folder.log_path.write_text("")
    for config, advice in (
        (None, "from its own program"),
        ("seed = 1", "from its own"),
        ("[train]", "hybridtrainer resume"),
    ):
        if config is not None:
            (tmp_path / "run" / "config.toml").write_text(config)
        assert was_made_by_command(tmp_path / "run") == (config == "[train]")
        with pytest.raises(RunFolderError, match=f"already holds a run.*{advice}"):
            RunFolder(tmp_path / "run", keep_last=3)
    RunFolder(tmp_path / "run", keep_last=3, resume=True).close()


def test_leftovers_of_an_interrupted_save_are_swept_at_the_next_start(tmp_path):
    draft = tmp_path / "run" / "checkpoints" / ".writing-000001-step-5-99"
    draft.mkdir(parents=True)
    (draft / "state.safetensors").write_text("half")
    RunFolder(tmp_path / "run", keep_last=3).close()
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_made_gives_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run", keep_last=3)


def test_a_read_only_file_system_gives_a_clear_error(tmp_path, monkeypatch):
    def refuse(path: object, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "open", refuse)  # tests may run as root, who may write anywhere
    with pytest.raises(RunFolderError, match="Read-only file system"):
        RunFolder(tmp_path / "run", keep_last=3)


def test_a_link_in_place_of_a_draft_leads_nowhere(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    with RunFolder(tmp_path / "run", 3) as folder:
        (folder.path / ".environment.json.draft").symlink_to(secret)
        folder.write_json("environment.json", {"a": 1})
        assert secret.read_text() == "mine"
        assert not (folder.path / "environment.json").is_symlink()


def test_a_nul_character_in_the_path_is_said_so():
    with pytest.raises(RunFolderError, match="NUL"):
        RunFolder("runs/a\0b", 3)


def test_a_run_that_should_go_on_and_is_not_there_is_told(tmp_path, recwarn):
    with pytest.warns(UserWarning, match="no run in .*mistyped to go on with"):
        open_run(tmp_path / "mistyped", 1, resume=True).close()
    with open_run(tmp_path / "new", 1, resume=False) as folder:
        folder.log_path.touch()
    open_run(tmp_path / "new", 1, resume=True).close()
    assert not recwarn.list
