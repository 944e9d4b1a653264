"""System calls of the sandbox through ctypes: namespaces, mounts, privileges, and the seccomp filter.

Standard library only, and nothing of this package: these files run alone, in the sandbox's own interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x00000080
NEW_MASK = 0x7E020000 | CLONE_NEWTIME
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MS_NOATIME, MNT_DETACH = 1024, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38

_libc = ctypes.CDLL(None, use_errno=True)

# Numbers of the calls a program has no business with: other processes, the kernel's own state, new namespaces,
# sockets, and memory that no limit of ours counts (memfd, System V shared memory, message queues).
_COMMON = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
           "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442,
           "memfd_secret": 447}  # fmt: skip
_DENIED = {
    "x86_64": (0xC000003E, 56, {
        **_COMMON, "socket": 41, "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "unshare": 272, "setns": 308, "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321,
        "perf_event_open": 298, "userfaultfd": 323, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "mknod": 133, "mknodat": 259, "personality": 135,
        "acct": 163, "swapon": 167, "swapoff": 168, "reboot": 169, "syslog": 103, "quotactl": 179,
        "settimeofday": 164, "adjtimex": 159, "clock_settime": 227, "memfd_create": 319, "shmget": 29, "msgget": 68,
        "semget": 64, "mq_open": 240, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "vhangup": 153,
    }),
    "aarch64": (0xC00000B7, 220, {
        **_COMMON, "socket": 198, "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "unshare": 97, "setns": 268, "add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280,
        "perf_event_open": 241, "userfaultfd": 282, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "mknodat": 33, "personality": 92, "acct": 89,
        "swapon": 224, "swapoff": 225, "reboot": 142, "syslog": 116, "quotactl": 60, "settimeofday": 170,
        "adjtimex": 171, "clock_settime": 112, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190,
        "mq_open": 180, "vhangup": 58,
    }),
}  # fmt: skip
_CLONE3, _EPERM, _ENOSYS = 435, 1, 38


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags`."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system."""
    arguments = [text.encode() if text else None for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), data.encode() or None), f"mount {kind or source} on {target}")


def bind_read_only(source: str, target: str) -> None:
    """Show `source` with everything below it at `target`, read-only, without devices and setuid programs."""
    mount(source, target, "", MS_BIND | MS_REC)
    attributes = struct.pack("QQQQ", 0x1 | 0x2 | 0x4, 0, 0, 0)  # RDONLY, NOSUID, NODEV
    result = _libc.syscall(442, -100, target.encode(), 0x8000, attributes, len(attributes))  # mount_setattr, recursive
    if result < 0:  # kernels before 5.12; flags the mount already has must be kept
        kept = os.statvfs(target).f_flag & (MS_NOEXEC | MS_NOATIME)
        mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def pivot_root(new: str) -> None:
    """Make `new` the root and drop the old one out of sight."""
    os.chdir(new)
    number = {"x86_64": 155, "aarch64": 41}.get(platform.machine())
    if number is None:
        raise OSError(f"pivot_root: unknown machine {platform.machine()}")
    _check(_libc.syscall(number, b".", b"."), "pivot_root")  # old root on top of the new one, then taken off
    _check(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    """Set one attribute of this process."""
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    _check(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def drop_bounding_set() -> None:
    """Let no program that is started from here on have any capability; needs rights, so it comes before losing them."""
    for capability in range(64):
        with contextlib.suppress(OSError):
            prctl(PR_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Give up every capability for good, and any way to get one back."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def deny_dangerous_calls() -> bool:
    """Install the seccomp filter; False on a machine whose call numbers are not known here."""
    known = _DENIED.get(platform.machine())
    if known is None:
        return False
    arch, clone, denied = known

    def instruction(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, any_bit, done = 0x20, 0x15, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000

    def error(number: int) -> bytes:
        return instruction(done, 0x00050000 | number)

    program = [instruction(load, 4), instruction(equal, arch, 1, 0), instruction(done, kill), instruction(load, 0)]
    program += [instruction(any_bit, 0x40000000, 0, 1), error(_EPERM)]  # the x32 twin of every call
    for number in sorted(denied.values()):
        program += [instruction(equal, number, 0, 1), error(_EPERM)]
    program += [instruction(equal, _CLONE3, 0, 1), error(_ENOSYS)]  # its flags are out of reach: libc falls back
    program += [
        instruction(equal, clone, 0, 3),
        instruction(load, 16),
        instruction(any_bit, NEW_MASK, 0, 1),
        error(_EPERM),
    ]
    program += [instruction(done, allow)]
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.c_char_p(header), zero, zero)
    _check(result, "seccomp")
    return True
