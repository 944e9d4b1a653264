"""A run on several GPUs: one process per GPU, started by `accelerate launch`, behind the worker of its slot.

The worker itself stays warm and passes messages on: the first rank connects to a socket of the worker and speaks
for all of them, as if it were the worker. Every rank dies with its launcher, and the launcher with the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sweeps.engines.worker import Link, Message, die_with, load_function, prepare_torch, train_one
from sweeps.failures import describe_exit

ADDRESS = "REASONRL_RANK_SOCKET"
JOB = "job.json"
_POLL_S = 0.1
_LAST_WORDS_S = 10.0  # between the first rank's end and that of its launcher


def launch(
    link: Link, train: str, job: Message, run_dir: Path, num_ranks: int, threads: int, config: str = ""
) -> Message:
    """Train one run on `num_ranks` processes; returns the answer of the first, or what became of them.

    `config` is a file for accelerate's launcher, which says more than one process per GPU.
    """
    (run_dir / JOB).write_text(json.dumps({"job": job, "train": train, "threads": max(1, threads // num_ranks)}))
    folder = Path(tempfile.mkdtemp(prefix="reasonrl-ranks-"))
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(str(folder / "socket"))
            server.listen(1)
            command = [sys.executable, "-m", "accelerate.commands.launch"]
            plain = ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
            # the devices are the slot's, whatever the file says
            command += ["--config_file", config, "--gpu_ids", "all", "--machine_rank", "0"] if config else plain
            command += ["--num_processes", str(num_ranks), "--num_machines", "1", "--main_process_port", "0"]
            command += ["-m", "sweeps.engines.ranks", str(run_dir / JOB)]
            env = {**os.environ, ADDRESS: str(folder / "socket")}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)
            try:
                return _relay(link, server, process, job["key"])
            finally:
                _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _relay(link: Link, server: socket.socket, process: subprocess.Popen[bytes], key: str) -> Message:
    """Pass messages between the coordinator and the first rank until it has said how its run ended."""
    server.setblocking(False)
    rank: socket.socket | None = None
    buffer = b""
    while True:
        ready, _, _ = select.select([rank or server], [], [], _POLL_S)
        if ready and rank is None:
            rank, _ = server.accept()
        elif ready and rank is not None:
            data = rank.recv(1 << 18)
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message["type"] in ("done", "failed"):
                    return dict(message)
                link.forward(line.decode())
            if not data:
                rank.close()
                return _fate(process, key)
        command = link.command(key)
        if command is not None and rank is not None:
            rank.sendall(json.dumps(command).encode() + b"\n")
        elif command is not None:
            link.put_back(command)
        if rank is None and process.poll() is not None:
            return _fate(process, key)


def _fate(process: subprocess.Popen[bytes], key: str) -> Message:
    """What became of ranks that went away without a word."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_LAST_WORDS_S)
    what = describe_exit({"code": process.returncode, "signal": None, "oom": False})
    return {"type": "failed", "key": key, **what, "error_class": "killed", "message": "a rank of the run went away"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let the launcher collect its ranks, or end it; ranks follow by themselves."""
    try:
        process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(path: str) -> None:
    """One rank: trains with the others, and reports when it is the first."""
    die_with(os.getppid())
    todo: dict[str, Any] = json.loads(Path(path).read_text())
    job: Message = todo["job"]
    train = load_function(todo["train"])
    prepare_torch(train, int(todo["threads"]), 1.0, 0)
    if int(os.environ.get("RANK", 0)):
        train_one(None, train, job)
        return
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[ADDRESS])
    link = Link(connection)
    link.tell(train_one(link, train, job))


if __name__ == "__main__":
    main(sys.argv[1])
