"""Plain Python values as JSON lines between tester and program; nothing that could carry behaviour passes.

Lists, tuples, sets, dictionaries, texts, bytes and numbers keep their kind; anything else becomes a handle, a number
that only its owner can use. Standard library only.
"""

from __future__ import annotations

import json
import os

MAX_DEPTH = 60


class Broken(Exception):
    """The other side closed, sent too much, or sent what is no message."""


def dump(message: dict) -> bytes:
    """Return a message as one line."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def encode(value, handle_of, depth: int = 0):
    """Return `value` as JSON; `handle_of(value)` gives the number of a value that cannot travel, or None.

    Raises TypeError when neither is possible, ValueError for a structure nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if -(2**53) < value < 2**53 else {"i": hex(value)}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, list):
        return [encode(item, handle_of, depth + 1) for item in value]
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    for kind, key in ((tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {key: [encode(item, handle_of, depth + 1) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(k, handle_of, depth + 1), encode(v, handle_of, depth + 1)] for k, v in value.items()]
        return {"d": pairs}
    number = handle_of(value)
    if number is None:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    return {"h": number}


def decode(value, handle, depth: int = 0):
    """Return the value an encoded one stands for; `handle(number)` stands in for what could not travel."""
    if depth > MAX_DEPTH:
        raise Broken("sent a value nested too deeply")
    if isinstance(value, list):
        return [decode(item, handle, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((key, body),) = value.items()
        if key == "i":
            return int(body, 16)
        if key == "f":
            return float.fromhex(body)
        if key == "b":
            return bytes.fromhex(body)
        if key == "c":
            return complex(float.fromhex(body[0]), float.fromhex(body[1]))
        if key == "h":
            return handle(int(body))
        if key == "d":
            return {decode(k, handle, depth + 1): decode(v, handle, depth + 1) for k, v in body}
        items = [decode(item, handle, depth + 1) for item in body]
        if key == "r":
            return range(*items)
        return tuple(items) if key == "t" else {"s": set, "z": frozenset}[key](items)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        raise Broken("sent what is no value") from None


class Reader:
    """Reads messages line by line from a descriptor, at most `max_bytes` each."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self.descriptor, self.max_bytes, self.buffer = descriptor, max_bytes, b""

    def read(self):
        """Return the next message; raises Broken."""
        while b"\n" not in self.buffer:
            piece = os.read(self.descriptor, 65536)
            if not piece:
                raise Broken("ended before it answered")
            self.buffer += piece
            if len(self.buffer) > self.max_bytes:
                raise Broken(f"answered with more than {self.max_bytes} bytes")
        line, self.buffer = self.buffer.split(b"\n", 1)
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise Broken("sent what is no message") from None
