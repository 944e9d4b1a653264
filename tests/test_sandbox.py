"""The sandbox: right programs pass, and every attack gets nothing. Each attack reports what it got through a test."""

# ruff: noqa: E501 - attacks stand on one line each
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from reasonrl import sandbox
from reasonrl.errors import ConfigError, VerifierError
from reasonrl.sandbox import Limits, Outcome, run_tests
from reasonrl.tasks import TaskConfig, load_task
from reasonrl.tasks.code import CodeTask, parse_tests, program_of

ROOT = Path(__file__).resolve().parent.parent
QUICK = Limits(cpu_s=1.0, wall_s=1.5)
HEAD = """
import ctypes, gc, mmap, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    return getattr(libc, name)(*arguments), ctypes.get_errno()
def report():
    try:
        return repr(attack())
    except BaseException as error:
        return type(error).__name__ + ': ' + str(error)
def attack():
"""
walled = pytest.mark.skipif(sandbox.walls()[0] is None, reason=f"no walls here: {sandbox.walls()[1]}")


def attack(body: str, limits: Limits | None = None) -> str:
    """Run the body of a function as an attack and return what it got, or how it ended."""
    program = HEAD + "\n".join("    " + line for line in body.strip().splitlines()) + "\n"
    outcome = run_tests(program, "asserts", ["raise ValueError(report())"], limits=limits or Limits(wall_s=20.0))
    prefix = "test 1: ValueError: "
    return (
        outcome.detail.removeprefix(prefix)
        if outcome.detail.startswith(prefix)
        else f"{outcome.status}: {outcome.detail}"
    )


def left_over() -> list[str]:
    """Return the sandbox processes of this test process that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (b"isolate.py" in (line := (entry / "cmdline").read_bytes())):
                arguments = line.split(b"\0")
                found += [entry.name] if str(os.getpid()).encode() in arguments else []
    return found


@walled
@pytest.mark.parametrize(
    ("program", "mode", "tests", "entry"),
    [
        ("def f(x):\n    return x * 2", "asserts", ["assert f(2) == 4", "assert f('a') == 'aa'"], None),
        ("def f(x):\n    return (x, {1: 'a'}, {2}, b'c', None, 1.5, 2j, 10**30)", "asserts",
         ["assert f(1) == (1, {1: 'a'}, {2}, b'c', None, 1.5, 2j, 10**30)"], None),
        ("def f(n):\n    for i in range(n):\n        yield i", "asserts", ["assert list(f(3)) == [0, 1, 2]"], None),
        ("class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
         "    def pop(self): return self.a.pop()", "asserts",
         ["s = Stack()\ns.push(3)\ns.push(4)\nassert s.pop() == 4 and s.a == [3]"], None),
        ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x", "asserts",
         ["try:\n    f(-1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"], None),
        ("import math\ndef f(x):\n    return math.sqrt(x)", "asserts", ["assert abs(f(2) - math.sqrt(2)) < 1e-9"], None),
        ("def g(x):\n    return x + 1", "asserts", ["def check(candidate):\n    assert candidate(1) == 2\n"], "g"),
        ("def add(a, b):\n    return a + b", "calls", [{"args": [1, 2], "expected": 3},
         {"args": [[1], [2]], "expected": [1, 2]}, {"kwargs": {"a": 0.1, "b": 0.2}, "expected": 0.3}], "add"),
        ("def f():\n    return (1, [2, {'a': 3}])", "calls", [{"args": [], "expected": [1, [2, {"a": 3}]]}], "f"),
        ("print(sum(map(int, input().split())))", "stdio", [{"input": "1 2\n", "output": "3\n"},
         {"input": "4 5", "output": "9"}], None),
        ("import sys\nprint(len(sys.stdin.read()))", "stdio", [{"input": "x" * 300_000, "output": "300000"}], None),
        ("print('debugging')\ndef f(): return 1", "asserts", ["assert f() == 1"], None),
        ("open('a', 'w').write('x')\ndef f(): return open('a').read()", "asserts", ["assert f() == 'x'"], None),
    ],
)  # fmt: skip
def test_right_program_passes(program: str, mode: str, tests: list, entry: str | None) -> None:
    assert run_tests(program, mode, tests, entry) == Outcome("passed")


@walled
@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("def f(x): return x", "test 1 failed"),
        ("def g(x): return 4", "name 'f' is not defined"),
        ("def f(x: return 4", "SyntaxError"),
        ("def f(x): return 1 / 0", "ZeroDivisionError"),
        ("def f(x): return 4 if x == 2 else 5", "test 2 failed"),
        # ending early, with success
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended before it answered"),
        ("import os\ndef f(x): os._exit(0)", "ended before it answered"),
        ("def f(x): raise SystemExit(0)", "SystemExit"),
        ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 3", "test 1 failed"),
        # tampering with the comparison
        ("class Any:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return Any()", "test 1 failed"),
        ("class Any(int):\n    def __eq__(self, other): return True\ndef f(x): return Any(3)", "test 1 failed"),
        ("import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {})\ndef f(x): return 3", "test 1 failed"),
        ("import sys\nsys.excepthook = lambda *a: None\ndef f(x): return 3", "test 1 failed"),
        ("def f(x): return 3\ndef abs(x): return 0\ndef len(x): return 0\ndef all(x): return True", "test 1 failed"),
        ("def f(x):\n    import inspect\n    return inspect.currentframe().f_back.f_locals.get('expected', 3)", "test 1 failed"),
        ("import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, str) and 'assert f' in o: return 4\n"
         "    return 3", "test 1 failed"),
        # claiming success
        ("print('4')\nprint('All tests passed')\nprint('{\"status\": \"passed\"}')\ndef f(x): return 3", "test 1 failed"),
        ("import os\nfor d in range(64):\n    try: os.write(d, b'{\"status\": \"passed\", \"detail\": \"\", \"passed\": 2}\\n')\n"
         "    except OSError: pass\ndef f(x): return 3", "out of turn"),
        ("import os\ndef f(x):\n    os.write(4, b'{\"id\": 2, \"value\": true}\\n')\n    return 3", "failed"),
        ("import os\ndef f(x):\n    os.write(4, b'[' * 100000 + b'\\n')\n    return 4", "no message"),
        ("import os\ndef f(x):\n    while True: os.write(4, b'x' * 65536)", "more than 1048576 bytes"),
        ("def f(x):\n    a = []\n    for _ in range(5000): a = [a]\n    return a", "nested too deeply"),
        ("def f(x): return 'x' * 10**7", "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_wrong_or_cheating_program_fails(program: str, detail: str) -> None:
    outcome = run_tests(program, "asserts", ["assert f(2) == 4", "assert abs(f(3)) == 6 and len([f(1)]) == 1"])
    assert outcome.status == "wrong" and detail in outcome.detail, outcome


@walled
def test_program_never_sees_what_is_expected_of_it() -> None:
    hunt = (
        "import gc, os\n"
        "def f():\n"
        "    needle = ''.join(reversed('4102856397731946'))\n"
        "    found = [type(o).__name__ for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and needle in str(o)]\n"
        "    files = ['/proc/self/cmdline', '/proc/self/environ'] + ['/box/' + n for n in os.listdir('/box')]\n"
        "    return found + [name for name in files if needle.encode() in open(name, 'rb').read()]\n"
    )
    assert run_tests(
        hunt, "asserts", ["assert f() == [], 6491377936582014", "assert f() != 6491377936582014"]
    ) == Outcome("passed")


@walled
@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("return sorted(os.environ)", "['HOME', 'LANG', 'PATH', 'TMPDIR']"),
        ("return open('/etc/passwd').read()", "FileNotFoundError"),
        (f"return os.listdir({str(ROOT)!r})", "FileNotFoundError"),
        ("return [n for n in os.listdir('/') if n in ('home', 'var', 'mnt', 'srv', 'opt', 'sys', 'boot')]", "[]"),
        ("return os.listdir('/etc')", "['ld.so.cache']"),
        ("return open('/usr/x', 'w')", "Read-only file system"),
        ("return open('/x', 'w')", "Read-only file system"),
        ("return open('/dev/x', 'w')", "Read-only file system"),
        ("return os.mkdir('/proc/x')", "Error"),
        ("return os.remove(sys.executable)", "Error"),
        ("return open('/etc/ld.so.cache', 'r+')", "Error"),
        ("return os.chmod('/box/../usr', 0o777)", "Read-only file system"),
        ("return os.symlink('/etc/shadow', '/box/s') or open('/box/s').read()", "FileNotFoundError"),
        ("return os.mknod('/box/m', 0o20666, os.makedev(1, 1))", "PermissionError"),
        ("return open('/dev/mem')", "FileNotFoundError"),
        ("f = open('/box/a', 'wb')\nwhile True: f.write(b'x' * 65536)", "File too large"),
        ("for i in range(10**5): open(f'/box/{i}', 'wb').write(b'x' * 10**6)", "No space left"),
        ("for i in range(10**5): os.mkdir(f'/box/{i}')", "No space left"),
        ("return socket.socket()", "PermissionError"),
        ("return socket.socket(socket.AF_UNIX)", "PermissionError"),
        ("return socket.create_connection(('127.0.0.1', 22))", "PermissionError"),
        ("import urllib.request\nreturn urllib.request.urlopen('http://example.com')", "URLError"),
        ("a, b = socket.socketpair()\nreturn sorted(os.listdir('/proc/net'))", "Error"),
        ("os.kill(os.getppid(), 9)\nos.kill(1, 9)\ntime.sleep(0.1)\nreturn os.getppid()", "1"),
        ("for s in (2, 15, 19, 20, 6): os.kill(1, s)\ntime.sleep(0.2)\nreturn 'still tested'", "'still tested'"),
        ("return os.kill(-1, 9)", "ProcessLookupError"),
        ("return os.killpg(0, 9)", "wrong: ended before it answered"),
        ("return [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]", "[]"),
        ("return open('/proc/1/environ').read()", "Error"),
        ("return open('/proc/1/mem', 'rb+')", "Error"),
        ("return os.listdir('/proc/1/fd')", "Error"),
        ("return open('/proc/sys/kernel/core_pattern').read()", "FileNotFoundError"),
        ("return [os.readlink(f'/proc/self/fd/{n}')[:5] for n in '01234']", "['/dev/', '/dev/', '/dev/', 'pipe:', 'pipe:']"),
        ("return call('ptrace', 16, 1, 0, 0)", "(-1, 1)"),
        ("return call('process_vm_readv', 1, 0, 0, 0, 0, 0)", "(-1, 1)"),
        ("return call('unshare', 0x10000000)", "(-1, 1)"),
        ("return call('mount', b'none', b'/box', b'tmpfs', 0, None)", "(-1, 1)"),
        ("return call('syscall', 435, 0, 0)", "(-1, 38)"),
        ("return call('shmget', 0, 1 << 30, 0o1600)", "(-1, 1)"),
        ("return call('syscall', 425, 8, 0)", "(-1, 1)"),
        ("return os.memfd_create('x')", "PermissionError"),
        ("return os.chroot('/box')", "PermissionError"),
        ("return os.setuid(0)", "Error"),
        ("return os.setgroups([0])", "PermissionError"),
        ("return (os.getuid(), os.geteuid(), os.getgroups())", "(1, 1, [])"),
        ("return [l for l in open('/proc/self/status') if l.startswith('Cap') and int(l.split()[1], 16)]", "[]"),
        ("return subprocess.run(['su', '-c', 'id'], capture_output=True).returncode != 0", "True"),
        ("return os.nice(-5)", "PermissionError"),
        ("import resource\nreturn resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "ValueError"),
        ("return len(bytearray(10**9))", "MemoryError"),
        ("a = []\nwhile True: a.append(bytearray(10**7))", "MemoryError"),
        ("for _ in range(8):\n    if os.fork() == 0:\n        a = bytearray(100 * 2**20)\n        time.sleep(60)\ntime.sleep(60)",
         "memory: used more than 256 MB"),
        ("m = mmap.mmap(-1, 100 * 2**20)\nm.write(b'x' * len(m))\nfor _ in range(6):\n    if os.fork() == 0:\n"
         "        n = mmap.mmap(-1, 60 * 2**20)\n        n.write(b'x' * len(n))\n        time.sleep(60)\ntime.sleep(60)",
         "memory: used more than 256 MB"),
        ("while True: os.fork()", "Resource temporarily unavailable"),
        ("while True: threading.Thread(target=time.sleep, args=(60,)).start()", "can't start new thread"),
        ("while True: subprocess.Popen(['/bin/sh', '-c', 'sleep 60'])", "Resource temporarily unavailable"),
        ("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)\nreturn 'left one'",
         "'left one'"),
        ("os.abort()", "wrong: ended before it answered"),
        ("ctypes.string_at(0)", "wrong: ended before it answered"),
    ],
)  # fmt: skip
def test_attack_gets_nothing(body: str, wanted: str) -> None:
    got = attack(body)
    assert wanted in got if not wanted.startswith(("[", "(", "1")) else got == wanted, got
    assert left_over() == []


@walled
@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "time.sleep(600)",
        "for s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: pass",
        "while True:\n    try: os.fork()\n    except OSError: pass",
        "while True: print('x' * 10**6)",
        "while True: sys.stderr.write('x' * 10**6)",
        "return 9 ** 9 ** 9 ** 9",
        "os.kill(os.getpid(), 19)",
    ],
)
def test_program_that_never_ends_is_ended_with_all_it_started(body: str) -> None:
    assert attack(body, QUICK).startswith("timeout: ")
    assert left_over() == []


@walled
def test_printing_without_end_is_cut_off_and_wrong() -> None:
    endless = run_tests(
        "while True: print('3')", "stdio", [{"input": "", "output": "3"}], limits=Limits(output_bytes=10_000)
    )
    assert endless == Outcome("wrong", "printed more than 10000 bytes")
    early = run_tests("print(3)\nimport sys\nsys.exit(1)", "stdio", [{"input": "", "output": "3"}])
    assert early == Outcome("wrong", "test 1: exit status 1")


@walled
def test_tests_that_cannot_be_run_say_nothing_about_the_program() -> None:
    assert run_tests("def f(g): return g(1)", "asserts", ["assert f(lambda x: x) == 1"]).status == "unusable"
    assert run_tests("def f(): return 1", "asserts", ["assert ("]).status == "unusable"


@walled
@pytest.mark.parametrize("processes", [1, 2])  # the first is up, or the one behind the walls too
def test_sandbox_ends_with_the_process_that_asked_for_it(processes: int) -> None:
    script = (
        "from reasonrl.sandbox import run_tests, walls, Limits\n"
        "print(walls(), flush=True)\n"
        "run_tests('import time\\ndef f(): time.sleep(600)', 'asserts', ['f()'], limits=Limits(wall_s=600.0))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    parent.stdout.readline()

    def inside() -> list[str]:
        wanted, found = str(parent.pid).encode(), []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                found += [entry.name] if b"isolate.py" in line and wanted in line.split(b"\0") else []
        return found

    def comes_true(condition: Callable[[], bool]) -> bool:
        for _ in range(1000):
            if condition():
                return True
            time.sleep(0.02)
        return False

    assert comes_true(lambda: len(inside()) >= processes)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert comes_true(lambda: not inside()), "a sandbox outlived the process that asked for it"


def _as_nobody(code: str) -> str:
    """Run Python code as an ordinary user with the system's interpreter and return what it printed."""
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if os.geteuid() != 0 or python is None:
        pytest.skip("needs root and a system Python")
    command = [python, "-B", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    with contextlib.suppress(PermissionError):
        done = subprocess.run(
            command, user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True
        )
        if "PermissionError" in done.stderr or "No module named 'reasonrl'" in done.stderr:
            pytest.skip("the checkout cannot be read by other users")
        assert done.returncode == 0, done.stderr
        return done.stdout
    pytest.skip("cannot become another user here")


@walled
def test_sandbox_works_for_an_ordinary_user_too() -> None:
    printed = _as_nobody(
        "from reasonrl.sandbox import run_tests, walls\n"
        "kind, reason = walls()\n"
        "if kind is None: raise SystemExit(print('none', reason) or 0)\n"
        "print(run_tests('def f(x): return x + 1', 'asserts', ['assert f(1) == 2']).status)\n"
        "for body in ('open(\"/etc/passwd\")', 'open(\"/usr/x\", \"w\")', 'socket.socket()', 'os.kill(1, 9) or 1 / 0'):\n"
        "    program = f'import os, socket\\ndef f(): return {body}'\n"
        "    print(run_tests(program, 'asserts', ['f()']).detail.split(':')[1])\n"
        "bomb = 'import os\\ndef f():\\n    while True: os.fork()'\n"
        "print(run_tests(bomb, 'asserts', ['f()']).detail.split(':')[1])\n"
    )
    if printed.startswith("none"):
        pytest.skip(f"this system gives ordinary users no walls: {printed}")
    wanted = ["passed", "FileNotFoundError", "OSError", "PermissionError", "ZeroDivisionError", "BlockingIOError"]
    assert [line.strip() for line in printed.split("\n") if line] == wanted


def test_no_walls_means_no_run_unless_told_unsafe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "walls", lambda: (None, "user namespaces are switched off"))
    monkeypatch.setattr("reasonrl.tasks.code.walls", lambda: (None, "user namespaces are switched off"))
    marker = tmp_path / "ran"
    program = f"open({str(marker)!r}, 'w').write('x')\ndef f(): return 1"
    with pytest.raises(VerifierError, match="user namespaces are switched off.*bubblewrap.*task.unsafe=true"):
        run_tests(program, "asserts", ["assert f() == 1"])
    assert not marker.exists()
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n}", "tests": ["assert f() == 1"]}) for n in range(4)))
    with pytest.raises(ConfigError, match="task.unsafe=False: .*switched off"):
        load_task(TaskConfig(kind="code", path=str(path)))
    assert run_tests(program, "asserts", ["assert f() == 1"], unsafe=True) == Outcome("passed")
    assert marker.exists()
    task = load_task(TaskConfig(kind="code", path=str(path), unsafe=True))
    assert isinstance(task, CodeTask) and "without walls" in task.notes[-1]


def test_walls_are_found_missing_where_the_kernel_forbids_them() -> None:
    if shutil.which("unshare") is None or sandbox.walls()[0] != "namespaces":
        pytest.skip("needs a system where namespaces can be switched off below this one")
    code = "from reasonrl.sandbox import walls; print(walls()[0])"
    forbid = f'echo 0 > /proc/sys/user/max_user_namespaces && PATH=/nowhere exec {sys.executable} -B -c "{code}"'
    done = subprocess.run(["unshare", "-Ur", "/bin/sh", "-c", forbid], cwd=ROOT, capture_output=True, text=True)
    if "Permission denied" in done.stderr:
        pytest.skip("this system does not let them be switched off")
    assert done.stdout.strip() == "None", done.stderr


def test_without_walls_limits_still_hold_and_nothing_is_left() -> None:
    limits = Limits(cpu_s=0.5, wall_s=1.0, processes=8)
    for body, status in (
        ("while True: pass", "timeout"),
        ("import time; time.sleep(600)", "timeout"),
        ("import os\n    os._exit(0)", "wrong"),
        ("bytearray(10**9)", "wrong"),
    ):
        assert run_tests(f"def f():\n    {body}", "asserts", ["f()"], limits=limits, unsafe=True).status == status
    daemon = "import os, time\ndef f():\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
    daemon += "            time.sleep(3600.125)\n        os._exit(0)\n    return 1"
    assert run_tests(daemon, "asserts", ["assert f() == 1"], unsafe=True) == Outcome("passed")
    assert left_over() == []


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Here:\n```python\nx = 1\n```\nDone", "x = 1\n"),
        ("```python\na = 1\n```\nbetter:\n```py\nb = 2\n```", "b = 2\n"),
        ("```python\nb = 2\n```\nrun it:\n```bash\npython b.py\n```", "b = 2\n"),
        ("<think>```python\nx = 1\n```</think>\n```\ny = 2\n```", "y = 2\n"),
        ("```python\ncut = off", "cut = off"),
        ("def f():\n    return 1", "def f():\n    return 1"),
        ("I cannot do that.", None),
        ("```bash\nls\n```", None),
    ],
)
def test_program_is_the_last_python_block(text: str, program: str | None) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    ("tests", "entry", "wanted"),
    [
        (["assert f(1) == 2"], None, ("asserts", ["assert f(1) == 2"], None)),
        ("def check(candidate): pass", "f", ("asserts", ["def check(candidate): pass"], "f")),
        ([{"input": "1", "output": "2"}], None, ("stdio", [{"input": "1", "output": "2"}], None)),
        ([{"args": [1], "expected": 2}], "f", ("calls", [{"args": [1], "expected": 2}], "f")),
        ('{"inputs": ["1"], "outputs": ["2"]}', None, ("stdio", [{"input": "1", "output": "2"}], None)),
        ('{"inputs": [[1]], "outputs": [2], "fn_name": "f"}', None, ("calls", [{"args": [1], "expected": 2}], "f")),
        ([{"args": [1], "expected": 2}], None, "no function to call (name it under 'entry_point')"),
        ({"inputs": [1], "outputs": []}, None, "1 inputs but 0 outputs"),
        ("[", None, "not JSON"),
        ("assert (", None, "test 1 is not Python"),
        ([], None, "none"),
        ([1], None, "their form is not known here"),
    ],
)
def test_tests_in_every_usual_form_are_understood(tests: object, entry: str | None, wanted: object) -> None:
    assert parse_tests(tests, entry) == wanted


@walled
def test_code_task_judges_programs_and_names_rows_without_tests(tmp_path: Path) -> None:
    rows = [
        {"question": f"double {n}", "tests": ["assert f(2) == 4"], "test_setup_code": "import math"} for n in range(6)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in [*rows, {"question": "none", "tests": []}, {"question": "no"}])
    )
    task = load_task(TaskConfig(kind="code", path=str(path), timeout_s=1.0))
    assert isinstance(task, CodeTask)
    assert "2 of 8 rows" in task.notes[0] and "rows.jsonl:7 has no usable tests under 'tests': none" in task.notes[0]
    problem = task.train_problem(0)
    texts = [
        "```python\ndef f(x): return 2 * x\n```",
        "def f(x):\n    return x",
        "no",
        "def f(x):\n    while True: pass",
    ]
    verdicts = task.score_many([(problem, text, "stop") for text in [*texts, texts[0]]])
    assert [verdict.reason for verdict in verdicts] == ["correct", "wrong", "not_extracted", "timeout", "correct"]
    with pytest.raises(ConfigError, match="Did you mean tests?"):
        load_task(TaskConfig(kind="code", path=str(path), tests_key="unit_tests"))
