"""Limits of this process, from the moment on when they are set: memory, CPU time, files, processes, signals, network.

They are set by an entry's process on itself, before it loads the entry, and cannot be lifted. Everywhere: resource
limits. On Linux (x86-64, aarch64) also a filter of system calls (seccomp), through which no file can be written, made,
renamed or removed, no process begun or signalled, no socket opened. It knows nothing of schedules.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import resource
import struct
import sys

#: machine -> (its name for the filter, column in CALLS)
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
#: system calls that fail, by their numbers on x86-64 and aarch64; None: there is none
CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "socketpair": (53, 199), "fork": (57, None), "vfork": (58, None), "execve": (59, 221),
    "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "ptrace": (101, 117),
    "process_vm_writev": (311, 271), "process_vm_readv": (310, 270), "pidfd_getfd": (438, 438), "creat": (85, None),
    "openat2": (437, 437), "open_by_handle_at": (304, 265), "truncate": (76, 45), "ftruncate": (77, 46),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "unlink": (87, None), "unlinkat": (263, 35),
    "symlink": (88, None), "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "mknod": (133, None), "mknodat": (259, 33), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "shmget": (29, 194),
    "mq_open": (240, 180), "semget": (64, 190), "msgget": (68, 186)}
OPEN, OPENAT, CLONE, CLONE3, PRLIMIT = (2, None), (257, 56), (56, 220), (435, 435), (302, 261)
WRITES = 0o1 | 0o2 | 0o100 | 0o1000  #: of open's flags: for writing, for both, to be made, to be cut
THREAD = 0x10000  #: of clone's flags
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def close(memory: int, seconds: int) -> bool:
    """Sets the limits: `memory` bytes beside those that are in use, so many seconds of CPU time, no files. Returns
    whether the filter of system calls is set as well."""
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 0),
                       (resource.RLIMIT_AS, _used() + memory)):
        soft = resource.getrlimit(what)[1]
        most = most if soft == resource.RLIM_INFINITY else min(most, soft)
        try:
            resource.setrlimit(what, (most, most))
        except (ValueError, OSError):  # not every system has each of them
            continue
    return sys.platform == "linux" and platform.machine() in MACHINES and _filter(*MACHINES[platform.machine()])


def _used() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 1 << 30


def _filter(machine: int, column: int) -> bool:
    """Sets the filter; returns whether the kernel has taken it."""
    refuse, rules = [(RET, 0, 0, REFUSE | errno.EPERM)], list[tuple[int, int, int, int]]()

    def rule(call: tuple[int | None, int | None], *then: tuple[int, int, int, int]) -> None:
        if (number := call[column]) is not None:
            rules.extend([(JEQ, 0, len(then), number), *then])

    for call in CALLS.values():
        rule(call, *refuse)
    low = 16  # where the arguments are, eight bytes each
    for call, argument in ((OPEN, 1), (OPENAT, 2)):
        rule(call, (LD, 0, 0, low + 8 * argument), (JSET, 0, 1, WRITES), *refuse, (RET, 0, 0, ALLOW))
    rule(CLONE, (LD, 0, 0, low), (JSET, 1, 0, THREAD), *refuse, (RET, 0, 0, ALLOW))
    rule(CLONE3, (RET, 0, 0, REFUSE | errno.ENOSYS))  # the C library then takes clone
    rule(PRLIMIT, (LD, 0, 0, low), (JEQ, 1, 0, 0), *refuse, (RET, 0, 0, ALLOW))
    steps = [(LD, 0, 0, 4), (JEQ, 1, 0, machine), (RET, 0, 0, KILL), (LD, 0, 0, 0), (JGE, 0, 1, 0x40000000),
             (RET, 0, 0, KILL), *rules, (RET, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    no_new_rights, set_filter, by_program = 38, 22, 2
    return (library.prctl(no_new_rights, 1, 0, 0, 0) == 0
            and library.prctl(set_filter, by_program, ctypes.byref(program), 0, 0) == 0)
