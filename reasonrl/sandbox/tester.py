"""The sandbox's trusted half: starts the untrusted program as another process, tests it from here, and judges.

The tests and the expected answers live in this process only. The program is reached by messages that carry plain
values, so it cannot read what is expected of it, replace the comparison, or end the test early with success.
Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import select
import signal
import sys

import wire
from watch import Judge, limit_program

HELPERS = ("math", "collections", "itertools", "functools", "operator", "string", "re", "heapq", "bisect", "copy",
           "random", "statistics", "fractions", "decimal", "datetime", "typing", "json", "cmath")  # fmt: skip


class Failed(Exception):
    """The program failed a test; the message says how."""


class Unusable(Exception):
    """The tests themselves cannot be run here; nothing is said about the program."""


class Program:
    """The untrusted process behind two pipes."""

    def __init__(self, script: str, limits: dict, argv: list[str], stdin: bytes | None = None) -> None:
        to_program, from_program = os.pipe(), os.pipe()
        script_mode = stdin is not None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ends = (to_program[0], from_program[1])
                null = os.open("/dev/null", os.O_RDWR)
                os.dup2(ends[0], 100)
                os.dup2(ends[1], 101)
                places = (100, 101, null, 102, 102) if script_mode else (null, null, null, 100, 101)
                for place, source in enumerate(places):
                    if source != 102:
                        os.dup2(source, place)
                os.closerange(3 if script_mode else 5, 65536)
                limit_program(limits)
                environment = {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "TMPDIR": os.getcwd()}
                os.execve(sys.executable, [sys.executable, "-I", "-B", "-X", "utf8", script, *argv], environment)
            finally:
                os._exit(127)
        os.close(to_program[0])
        os.close(from_program[1])
        self.input, self.output = to_program[1], from_program[0]
        os.set_blocking(self.input, False)

    def write(self, data: bytes) -> None:
        """Send bytes; a program that does not read them blocks nothing but its own test."""
        while data:
            try:
                data = data[os.write(self.input, data) :]
            except BlockingIOError:
                select.select([], [self.input], [], 0.1)
            except OSError:
                return

    def close(self) -> int:
        """End the program and return its exit status (negative: the signal)."""
        for descriptor in (self.input, self.output):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return -9


class Remote:
    """The program's namespace, reached by messages."""

    def __init__(self, script: str, job: dict) -> None:
        self.program = Program(script, job["limits"], [])
        self.max_bytes = job["limits"]["output_bytes"]
        self.number = 0
        self.reader = wire.Reader(self.program.output, self.max_bytes)
        names = self.ask("load", source=job["program"])
        self.names: dict[str, str] = {str(name): str(kind) for name, kind in dict(names).items()}

    def ask(self, verb: str, **fields):
        """Send one request and return its value; raises Failed or the exception the program raised."""
        self.number += 1
        request = wire.dump({"id": self.number, "verb": verb, **fields})
        self.program.write(request)
        try:
            answer = self.reader.read()
        except wire.Broken as error:
            raise Failed(str(error)) from None
        if not isinstance(answer, dict) or answer.get("id") != self.number:
            raise Failed("the program answered out of turn")
        if "error" in answer:
            raise _exception(answer["error"])
        return wire.decode(answer.get("value"), self.handle)

    def handle(self, number: int) -> Handle:
        """Return the stand-in of an object that stays in the program."""
        return Handle(self, number)

    def call(self, target, arguments, keywords):
        """Call a function of the program, by name or handle."""
        try:
            encoded = wire.encode(list(arguments), _number), wire.encode(dict(keywords), _number)
        except TypeError as error:
            raise Unusable(f"the tests pass a value that cannot be sent to the program: {error}") from None
        return self.ask("call", target=target, arguments=encoded[0], keywords=encoded[1])


def _number(value):
    if isinstance(value, Handle):
        return value._number
    if isinstance(value, Function) and value._number is not None:
        return value._number
    return None


def _exception(described) -> Exception:
    """Rebuild a builtin exception, so that tests that expect one can catch it."""
    try:
        name, message = str(described[0]), str(described[1])
    except (TypeError, IndexError, KeyError):
        return Failed("the program answered out of turn")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (AssertionError, UnicodeDecodeError):
        with contextlib.suppress(TypeError):
            return kind(message)
    return Failed(f"{name}: {message}")


class Function:
    """A function or class of the program, called by name."""

    def __init__(self, remote: Remote, name: str) -> None:
        self._remote, self._name, self._number = remote, name, None

    def __call__(self, *arguments, **keywords):
        return self._remote.call(self._name, arguments, keywords)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.ask("attribute", target=self._name, name=name)


class Handle:
    """An object that stays in the program; equal to nothing but itself, whatever its class says."""

    def __init__(self, remote: Remote, number: int) -> None:
        self._remote, self._number = remote, number

    def __eq__(self, other):
        return isinstance(other, Handle) and other._number == self._number

    def __hash__(self):
        return hash(self._number)

    def __bool__(self):
        raise Failed("a test needs true or false and got an object")

    def __call__(self, *arguments, **keywords):
        return self._remote.call(self._number, arguments, keywords)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._remote.ask("attribute", target=self._number, name=name)

    def __setattr__(self, name, value):
        if name.startswith("_"):
            object.__setattr__(self, name, value)
            return
        self._remote.ask("assign", target=self._number, name=name, value=wire.encode(value, _number))

    def __iter__(self):
        return iter(self._remote.ask("iterate", target=self._number))

    def __len__(self):
        return int(self._remote.ask("length", target=self._number))

    def __getitem__(self, key):
        return self._remote.ask("item", target=self._number, key=wire.encode(key, _number))

    def __str__(self):
        return str(self._remote.ask("text", target=self._number))

    __repr__ = __str__


def namespace(remote: Remote, entry: str | None, tests: list[str]) -> dict:
    """Return the names the tests use that the program defines, never one that Python itself provides.

    A program that redefines `abs`, `len` or `isclose` thereby changes its own answers, not the comparison.
    """
    names: dict = {"__name__": "tests", "__builtins__": builtins}
    for name in used_names(tests) - set(dir(builtins)):
        kind = remote.names.get(name)
        if kind == "module" and name in sys.stdlib_module_names:
            names[name] = _Module(name)
        elif kind == "value":
            names[name] = remote.ask("name", target=name)
        elif kind in ("function", "import"):
            helper = next((m for m in HELPERS if kind == "import" and hasattr(_imported(m), name)), None)
            names[name] = getattr(_imported(helper), name) if helper else Function(remote, name)
    if entry:
        names["candidate"] = names[entry] = Function(remote, entry)
    return names


def used_names(tests: list[str]) -> set[str]:
    """Return every name that the pieces of test code mention; raises Unusable for what is not Python."""
    found: set[str] = set()
    for place, piece in enumerate(tests):
        try:
            tree = ast.parse(piece)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise Unusable(f"test {place + 1} is not Python: {error}") from None
        found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return found


class _Module:
    """A standard module under the name the program gave it, imported here when it is used."""

    def __init__(self, name: str) -> None:
        self._module_name = name

    def __getattr__(self, name):
        return getattr(_imported(self._module_name), name)


def _imported(name: str):
    return importlib.import_module(name)


def run_asserts(script: str, job: dict) -> int:
    """Execute pieces of test code one after the other, then a `check(candidate)` if one of them defines it."""
    remote = Remote(script, job)
    entry = job.get("entry")
    if entry and entry not in remote.names:
        raise Failed(f"{entry} is not defined")
    names = namespace(remote, entry, job["tests"])
    for place, piece in enumerate(job["tests"]):
        _attempt(place, lambda piece=piece: exec(compile(piece, "tests", "exec"), names))
    if entry and callable(names.get("check")) and not isinstance(names["check"], Function):
        _attempt(len(job["tests"]) - 1, lambda: names["check"](names[entry]))
    return len(job["tests"])


def _attempt(place: int, run) -> None:
    """Run one piece of test code and turn whatever it raises into Failed, but for what is the tests' own fault."""
    try:
        run()
    except (Failed, Unusable):
        raise
    except AssertionError:
        raise Failed(f"test {place + 1} failed") from None
    except BaseException as error:
        raise Failed(f"test {place + 1}: {type(error).__name__}: {error}") from None


def run_calls(script: str, job: dict) -> int:
    """Call the entry function with each test's arguments and compare the result; lists and tuples are alike."""
    remote = Remote(script, job)
    function = Function(remote, job["entry"])
    for place, test in enumerate(job["tests"]):
        try:
            result = function(*test.get("args", []), **test.get("kwargs", {}))
        except (Failed, Unusable):
            raise
        except Exception as error:
            raise Failed(f"test {place + 1}: {type(error).__name__}: {error}") from None
        if not same(test["expected"], result):
            raise Failed(f"test {place + 1} failed")
    return len(job["tests"])


def same(expected, result) -> bool:
    """Compare plain values: 1 is not True, floats within 1e-9, tuples as lists, keys of JSON objects as texts."""
    if isinstance(expected, bool) or isinstance(result, bool):
        return isinstance(expected, bool) and isinstance(result, bool) and expected == result
    if isinstance(expected, (int, float)) and isinstance(result, (int, float)):
        if isinstance(expected, int) and isinstance(result, int):
            return expected == result
        return expected == result or abs(expected - result) <= 1e-9 * max(abs(expected), abs(result))
    if isinstance(expected, (list, tuple)) and isinstance(result, (list, tuple)):
        return len(expected) == len(result) and all(map(same, expected, result))
    if isinstance(expected, dict) and isinstance(result, dict):
        keyed = {str(key): value for key, value in result.items()}
        wanted = {str(key): value for key, value in expected.items()}
        return wanted.keys() == keyed.keys() and all(same(wanted[key], keyed[key]) for key in wanted)
    return type(expected) is type(result) and expected == result


def run_stdio(script: str, job: dict) -> int:
    """Run the program once per test with its input; compare what it prints, spaces at line ends aside."""
    path = os.path.join(os.getcwd(), "program.py")
    for place, test in enumerate(job["tests"]):
        with open(path, "w", encoding="utf-8", errors="replace") as file:
            file.write(job["program"])
        data = str(test["input"]).encode()
        program = Program(path, job["limits"], [], stdin=data)
        output, status = _exchange(program, data, job["limits"]["output_bytes"])
        if status != 0:
            raise Failed(f"test {place + 1}: exit status {status}")
        if lines_of(output.decode("utf-8", "replace")) != lines_of(str(test["output"])):
            raise Failed(f"test {place + 1} failed")
        with contextlib.suppress(OSError):
            os.unlink(path)
    return len(job["tests"])


def lines_of(text: str) -> list[str]:
    """Return the lines without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _exchange(program: Program, data: bytes, max_bytes: int) -> tuple[bytes, int]:
    """Feed the program and read what it prints until it closes its output; raises Failed past `max_bytes`."""
    output = b""
    while True:
        readable, writable, _ = select.select([program.output], [program.input] if data else [], [], 1.0)
        if writable:
            try:
                data = data[os.write(program.input, data[:65536]) :]
            except OSError:
                data = b""
        if not data and program.input >= 0:
            os.close(program.input)
            program.input = -1
        if readable:
            piece = os.read(program.output, 65536)
            if not piece:
                break
            output += piece
            if len(output) > max_bytes:
                raise Failed(f"printed more than {max_bytes} bytes")
    _, status = os.waitpid(program.pid, 0)
    os.close(program.output)
    return output, os.waitstatus_to_exitcode(status)


def main(served: str, walls: bool) -> None:
    """Read one job from standard input, run it, and say the verdict on standard output.

    `served` is the source of the process that serves the program (wire.py and candidate.py).
    """
    job = json.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN if walls else signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    script = os.path.join(os.getcwd(), "served.py")
    with open(script, "w") as file:
        file.write(served)
    judge = Judge(job["limits"], walls)
    try:
        passed = {"asserts": run_asserts, "calls": run_calls, "stdio": run_stdio}[job["mode"]](script, job)
    except Failed as error:
        judge.say("wrong", str(error))
    except Unusable as error:
        judge.say("unusable", str(error))
    except BaseException as error:
        judge.say("wrong", f"{type(error).__name__}: {error}")
    judge.say("passed", "", passed)
