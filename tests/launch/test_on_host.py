"""Scripts on the hosts: entrypoint.sh forwards signals; detached.sh survives disconnects; pack.sh leaves private files."""

import os
import shutil
import signal
import subprocess
import sys
import tarfile

import pytest

from tests.launch.stand_ins import ROOT
from xfresearch.runtime.hardware import git_commit

ENTRY = ["bash", str(ROOT / "launch" / "entrypoint.sh")]
DETACHED = ["bash", str(ROOT / "launch" / "detached.sh")]
SAVES = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: (time.sleep(.3), print('saved'), sys.exit({})));"


def start(words) -> subprocess.Popen:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_the_entry_point_exits_with_the_code_of_the_command(code):
    assert subprocess.run([*ENTRY, sys.executable, "-c", f"raise SystemExit({code})"]).returncode == code


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_signal_is_forwarded_and_the_command_has_time_to_save(code):
    process = start([*ENTRY, sys.executable, "-c", SAVES.format(code) + "print('up', flush=True); time.sleep(60)"])
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "saved\n"
    assert process.returncode == code


def test_the_settings_of_nccl_that_a_node_has_reach_the_command(tmp_path):
    """gIB's and TCPXO's come with the node, at paths that are in no other container."""
    settings = tmp_path / "set_nccl_env.sh"
    settings.write_text("export NCCL_NET=gIB FROM=$NCCL_LIB_DIR\n")
    text = (ROOT / "launch" / "entrypoint.sh").read_text()
    assert "/usr/local/gib/scripts/set_nccl_env.sh" in text
    script = tmp_path / "entrypoint.sh"
    script.write_text(text.replace("/usr/local/gib/scripts/set_nccl_env.sh", str(settings)))
    command = ["bash", str(script), "bash", "-c", "echo $NCCL_NET $FROM"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gIB /usr/local/nvidia/lib64\n", "")


def counted(tmp_path, then: str) -> list[str]:
    """A command that counts its starts in the file `starts`, then runs `then`."""
    begin = f"import sys, time; open({str(tmp_path / 'starts')!r}, 'a').write('x'); print('up', flush=True); "
    return [*DETACHED, str(tmp_path / "job"), sys.executable, "-c", begin + then]


def starts(tmp_path) -> int:
    return len((tmp_path / "starts").read_text())


def kill(tmp_path) -> None:
    os.killpg(int((tmp_path / "job" / "pid").read_text()), signal.SIGKILL)


def test_a_second_call_reconnects_to_the_same_run(tmp_path):
    words = counted(tmp_path, "time.sleep(1); print('end'); sys.exit(0)")
    first = start(words)
    assert first.stdout.readline() == "up\n"
    first.kill()
    again = start(words)
    assert again.communicate(timeout=20)[0] == "up\nend\n"
    assert again.returncode == 0 and starts(tmp_path) == 1


@pytest.mark.parametrize("code, times", [(0, 1), (3, 1), (1, 2), (2, 2), (75, 2), (143, 2)])
def test_only_exit_codes_other_than_0_and_3_start_the_run_again(tmp_path, code, times):
    words = counted(tmp_path, f"sys.exit({code})")
    for _ in range(2):
        assert subprocess.run(words, capture_output=True, timeout=20).returncode == code
    assert starts(tmp_path) == times


def test_two_calls_at_once_start_one_run(tmp_path):
    words = counted(tmp_path, "time.sleep(1); print('end')")
    calls = [start(words) for _ in range(4)]
    assert [call.communicate(timeout=20)[0] for call in calls] == ["up\nend\n"] * 4
    assert starts(tmp_path) == 1


def test_a_process_id_of_another_program_is_not_taken_for_the_run(tmp_path):
    """After a reboot, the number in the file may belong to any program."""
    words = counted(tmp_path, "sys.exit(1)")
    assert subprocess.run(words, capture_output=True, timeout=20).returncode == 1
    (tmp_path / "job" / "pid").write_text(str(os.getpid()))
    assert subprocess.run(words, capture_output=True, timeout=20).returncode == 1
    assert starts(tmp_path) == 2


def test_a_checkout_is_packed_without_private_files(tmp_path):
    """Only tracked files, with their changes, and the commit; neither .git nor files that git does not track."""
    checkout = tmp_path / "checkout"
    for name in ("launch/pack.sh", "launch/common.sh", "xfresearch/train.py", "README.md", "LICENSE"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    made = "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm c"
    subprocess.run(made, shell=True, cwd=checkout, check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    (checkout / "README.md").write_text("changed")
    (checkout / "LICENSE").unlink()
    (checkout / "secret.txt").write_text("a key")
    done = subprocess.run(
        ["bash", "launch/pack.sh", str(tmp_path / "a.tar.gz")], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert done.stderr == "[launch] 1 files are not packed, because git does not track them: secret.txt\n"
    packed = tmp_path / "there"
    shutil.unpack_archive(tmp_path / "a.tar.gz", packed)
    assert (packed / "README.md").read_text() == "changed" and (packed / "xfresearch" / "train.py").is_file()
    assert not any((packed / name).exists() for name in (".git", "secret.txt", "LICENSE"))
    assert git_commit(packed) == f"{commit}-dirty"


NAMES = ("train.py", "a[1].txt", "b*", "é.txt", "-C", "with space", "two\nlines", "back\\slash", "@x")


def test_the_archive_has_the_files_that_git_has_whatever_their_names(tmp_path):
    """A deleted train.py at the root takes no other train.py out, and no name is a pattern or an option."""
    checkout = tmp_path / "checkout"
    for name in ("launch/pack.sh", "launch/common.sh"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    for name in NAMES:
        for folder in (checkout, checkout / "deep"):
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(name)
    (checkout / "link").symlink_to("nowhere")
    made = "git init -q . && git add . && git -c user.name=a -c user.email=a@b commit -qm c"
    subprocess.run(made, shell=True, cwd=checkout, check=True)
    for name in NAMES:
        (checkout / name).unlink()
    pack = ["bash", "launch/pack.sh", str(tmp_path / "a.tar.gz")]
    done = subprocess.run(pack, cwd=checkout, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        names = archive.getnames()
    expected = [*(f"deep/{name}" for name in NAMES), "launch/pack.sh", "launch/common.sh", "link", "COMMIT"]
    assert sorted(names) == sorted(expected)


def test_a_killed_run_starts_again(tmp_path):
    words = counted(tmp_path, "time.sleep(60)")
    first = start(words)
    assert first.stdout.readline() == "up\n"
    kill(tmp_path)
    first.communicate(timeout=20)
    assert first.returncode == 137
    again = start(words)
    assert again.stdout.readline() == "up\n"
    kill(tmp_path)
    again.communicate(timeout=20)
    assert starts(tmp_path) == 2


def test_a_killed_run_does_not_report_the_exit_code_of_the_previous_run(tmp_path):
    words = counted(tmp_path, f"sys.exit(1) if len(open({str(tmp_path / 'starts')!r}).read()) == 1 else time.sleep(60)")
    assert subprocess.run(words, capture_output=True, timeout=20).returncode == 1
    second = start(words)
    assert second.stdout.readline() == "up\n"
    kill(tmp_path)
    second.communicate(timeout=20)
    assert second.returncode == 137


def test_another_command_does_not_get_the_result_of_the_first(tmp_path):
    assert subprocess.run(counted(tmp_path, "sys.exit(0)"), capture_output=True, timeout=20).returncode == 0
    done = subprocess.run(counted(tmp_path, "sys.exit(1)"), capture_output=True, text=True, timeout=20)
    assert done.returncode == 4 and "another command was started here" in done.stderr


def test_the_words_of_a_command_are_compared_and_not_their_text(tmp_path):
    words = [*DETACHED, str(tmp_path / "job"), "printf", "%s."]
    assert subprocess.run([*words, "a b", "c"], capture_output=True, timeout=20).stdout == b"a b.c."
    again = subprocess.run([*words, "a", "b c"], capture_output=True, text=True, timeout=20)
    assert (again.returncode, again.stdout) == (4, "")
    assert again.stderr == "error: another command was started here: 'printf' '%s.' 'a b' 'c'\n"
    assert subprocess.run([*words, "a b", "c"], capture_output=True, timeout=20).stdout == b"a b.c."


def test_a_directory_that_is_a_link_is_refused_and_its_files_are_left(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "log").write_text("kept")
    (tmp_path / "job").symlink_to("private")
    done = subprocess.run([*DETACHED, str(tmp_path / "job"), "true"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/job is a link, or the directory of somebody else\n")
    assert (tmp_path / "private" / "log").read_text() == "kept"


def test_nobody_else_can_write_into_the_directory(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(0o777)
    assert subprocess.run([*DETACHED, str(tmp_path / "job"), "true"], capture_output=True, timeout=20).returncode == 0
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700
