"""The sandbox's first process: makes the walls, then becomes the tester inside them.

Run as `python -I -S -B isolate.py KIND PARENT` with KIND namespaces, inside (a wall stands already, as under
bubblewrap) or none. The walls are new user, mount, process, network, IPC, host-name and cgroup namespaces; a root
file system in memory with the system's libraries and the interpreter read-only and one small scratch folder; no
capabilities; a seccomp filter. The tester is process 1 in there, so nothing inside can signal it, and when it ends
the kernel ends everything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import syscalls as sc  # noqa: E402
import tester  # noqa: E402

SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
DEVICES = ("null", "zero", "full", "random", "urandom")
SCRATCH_BYTES, SCRATCH_FILES = 16 * 2**20, 512
FAILED = 97  # exit status: the walls could not be made; the reason is on standard error


def map_users(pid: int, root: bool) -> None:
    """Write the user map of process `pid`: the program's user is inner 1; as root it is nobody known outside."""
    user, group = os.getuid(), os.getgid()
    outer = 0x60000000 + (pid & 0xFFFFFF)  # a user of its own, so that limits per user count this sandbox alone
    users = f"0 {user} 1\n1 {outer} 1\n" if root else f"1 {user} 1\n"
    groups = f"0 {group} 1\n1 {outer} 1\n" if root else f"1 {group} 1\n"
    if not root:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
    for name, text in (("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def enter_namespaces() -> None:
    """Move this process into new namespaces; a helper outside writes the user map, as root needs."""
    root = os.geteuid() == 0
    target = os.getpid()
    ready, go = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:
        status = 1
        os.close(ready[1])  # or its own end would keep it waiting when the namespaces are refused
        with contextlib.suppress(OSError):
            if os.read(ready[0], 1):
                map_users(target, root)
                status = 0
        os.write(go[1], bytes([status]))
        os._exit(0)
    sc.unshare(
        sc.CLONE_NEWUSER | sc.CLONE_NEWNS | sc.CLONE_NEWPID | sc.CLONE_NEWNET | sc.CLONE_NEWIPC | sc.CLONE_NEWUTS
        | sc.CLONE_NEWCGROUP
    )  # fmt: skip
    os.write(ready[1], b"x")
    answer = os.read(go[0], 1)
    os.waitpid(helper, 0)
    for descriptor in (*ready, *go):
        os.close(descriptor)
    if answer != b"\0":
        raise OSError("the user map could not be written")


def interpreter_folders() -> list[str]:
    """Return the folders of the running interpreter that are not part of the system's."""
    executable = os.path.realpath(sys.executable)
    folders = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix), os.path.dirname(executable)}
    outside = [folder for folder in sorted(folders) if not folder.startswith(tuple(f"{name}/" for name in SYSTEM))]
    chosen: list[str] = []
    for folder in outside:
        if folder in SYSTEM or folder == "/" or any(folder.startswith(f"{other}/") for other in chosen):
            continue
        chosen.append(folder)
    return chosen


def build_root() -> None:
    """Mount a new root in memory and move into it; only /box can be written to."""
    with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    sc.mount("none", "/", "", sc.MS_REC | sc.MS_PRIVATE)
    needed = interpreter_folders()
    places = [place for place in ("/tmp", "/mnt", "/srv", "/media", "/opt") if os.path.isdir(place)]
    root = next(place for place in places if not any(folder.startswith(place) for folder in needed))
    flags = sc.MS_NOSUID | sc.MS_NODEV
    sc.mount("tmpfs", root, "tmpfs", flags, "size=1m,nr_inodes=512,mode=755")
    for source in (*SYSTEM, *needed):
        target = root + source
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.makedirs(target, exist_ok=True)
            sc.bind_read_only(source, target)
    os.makedirs(root + "/etc", exist_ok=True)
    os.makedirs(root + "/dev", exist_ok=True)
    for name in ("/etc/ld.so.cache", *(f"/dev/{device}" for device in DEVICES)):
        if os.path.exists(name):
            with open(root + name, "w"):
                pass
            sc.bind_read_only(name, root + name) if name.startswith("/etc") else sc.mount(
                name, root + name, "", sc.MS_BIND
            )
    os.makedirs(root + "/box")
    os.makedirs(root + "/proc")
    os.symlink("box", root + "/tmp")
    limits = f"size={SCRATCH_BYTES},nr_inodes={SCRATCH_FILES},mode=700,uid=1,gid=1"
    sc.mount("tmpfs", root + "/box", "tmpfs", flags, limits)
    for options in ("subset=pid,hidepid=2", "hidepid=2"):
        with contextlib.suppress(OSError):  # refused inside some containers; the tester then does without
            sc.mount("proc", root + "/proc", "proc", flags | sc.MS_NOEXEC, options)
            break
    sc.pivot_root(root)
    sc.mount("none", "/", "", sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | flags)
    os.chdir("/box")


def become_nobody() -> None:
    """Take the program's user and give up all rights."""
    sc.drop_bounding_set()
    if os.getuid() != 1:
        os.setgroups([])
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    sc.drop_capabilities()


def die_with_parent(parent: int) -> None:
    """End when the parent does; `parent` 0 means that its number is not visible from here."""
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        os._exit(0)


def end_if_closed(life: int) -> None:
    """End when the other end of this pipe is closed: the parent died before its death could be signalled."""
    os.set_blocking(life, False)
    with contextlib.suppress(BlockingIOError):
        os.read(life, 1)
        os._exit(0)
    os.close(life)


def main(kind: str, parent: int) -> None:
    """Make the walls of `kind` and run the tester behind them."""
    os.umask(0o022)
    served = ""
    for name in ("wire.py", "candidate.py"):
        with open(os.path.join(HERE, name), encoding="utf-8") as file:
            served += file.read() + "\n"
    if kind == "none":
        with contextlib.suppress(OSError):
            die_with_parent(parent)
            sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)  # what the program leaves behind stays below us
        tester.main(served, walls=False)
    if kind == "namespaces":
        die_with_parent(parent)
        enter_namespaces()
        life, held = os.pipe()
        child = os.fork()
        if child:
            for descriptor in (0, 1, 2, life):
                os.close(descriptor)
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        os.close(held)
        build_root()
        become_nobody()  # a change of user forgets the signal, so it is asked for afterwards
        die_with_parent(0)
        end_if_closed(life)
    else:
        os.chdir("/box")
        sc.drop_bounding_set()
        sc.drop_capabilities()
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # same user as the program, yet not to be traced or read by it
    sc.deny_dangerous_calls()
    tester.main(served, walls=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except OSError as error:
        sys.stderr.write(json.dumps(str(error)))
        sys.stderr.flush()
        os._exit(FAILED)
