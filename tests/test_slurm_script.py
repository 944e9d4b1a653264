"""The Slurm script: what it refuses, what it starts, and that a task told to end writes checkpoints and asks again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "slurm_array.sh"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to submit from: an empty sweep.py, and a Python and an scontrol that write down what they are told."""
    (tmp_path / "sweep.py").touch()
    python, scontrol = tmp_path / "bin" / "python", tmp_path / "bin" / "scontrol"
    python.parent.mkdir()
    python.write_text(
        '#!/usr/bin/env bash\nprintf "%s\\n" "$@" > arguments\n'
        'trap "echo checkpoint > paused; exit 130" TERM\n'
        "touch running\nfor i in $(seq ${LASTS:-0}); do sleep 0.05; done\nexit ${CODE:-0}\n"
    )
    scontrol.write_text(f'#!/usr/bin/env bash\necho "$@" > {tmp_path}/requeued\n')
    python.chmod(0o755)
    scontrol.chmod(0o755)
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    given = {
        "PATH": f"{place}/bin:{os.environ['PATH']}", "REASONRL_PYTHON": str(place / "bin" / "python"),
        "REASONRL_STORAGE": "postgresql://me@db/sweeps", "REASONRL_RESULTS": str(place / "results"),
        "SLURM_SUBMIT_DIR": str(place), "SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "76", "SLURM_ARRAY_TASK_ID": "3",
    }  # fmt: skip
    return {**given, **more}


def submit(place: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=environment(place, **more), cwd="/", capture_output=True, text=True
    )


def test_a_task_is_the_same_command_with_the_shared_study_and_folder(place: Path) -> None:
    done = submit(place, "+sweep=clip_ablation", "sweep.question='Does it help?'")
    assert (done.returncode, done.stderr) == (0, "")
    assert (place / "arguments").read_text().splitlines() == [
        "sweep.py", "+sweep=clip_ablation", "sweep.question='Does it help?'", "-m",
        "study.storage=postgresql://me@db/sweeps", f"results={place}/results",
    ]  # fmt: skip
    assert (place / "results").is_dir()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"REASONRL_STORAGE": ""}, "set REASONRL_STORAGE to a postgresql:// URL"),
        ({"REASONRL_STORAGE": "sqlite:///x.db"}, "set REASONRL_STORAGE to a postgresql:// URL"),
        ({"REASONRL_RESULTS": ""}, "set REASONRL_RESULTS"),
        ({"REASONRL_RESULTS": "/proc/nowhere"}, "/proc/nowhere cannot be written to"),
        ({"SLURM_SUBMIT_DIR": "/"}, "no sweep.py in /"),
        ({"REASONRL_PYTHON": "/no/python"}, "no Python at /no/python"),
    ],
)
def test_what_is_missing_is_said_and_nothing_is_started(place: Path, more: dict[str, str], words: str) -> None:
    done = submit(place, "+sweep=clip_ablation", **more)
    assert done.returncode == 2 and words in done.stderr
    assert not (place / "arguments").exists()


def test_a_task_without_a_sweep_is_refused(place: Path) -> None:
    done = submit(place)
    assert done.returncode == 2 and "no sweep given" in done.stderr


def test_the_exit_code_of_the_sweep_is_that_of_the_task(place: Path) -> None:
    assert submit(place, "+sweep=x", CODE="1").returncode == 1
    assert not (place / "requeued").exists()


def test_a_task_told_to_end_pauses_its_runs_and_is_put_in_line_again(place: Path) -> None:
    task = subprocess.Popen(["bash", str(SCRIPT), "+sweep=x"], env=environment(place, LASTS="1000"), cwd="/")
    deadline = time.monotonic() + 30
    while not (place / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    task.send_signal(signal.SIGTERM)
    assert task.wait(timeout=30) == 130
    assert (place / "paused").read_text() == "checkpoint\n"
    assert (place / "requeued").read_text() == "requeue 76_3\n"
