"""A small expression language for choosing rows: `level == "Level 5" and len(problem) < 400`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from reasonrl.errors import ConfigError, Mistake

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}  # fmt: skip
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Div: operator.truediv, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "int": int, "float": float, "str": str, "abs": abs}
_METHODS = ("startswith", "endswith", "lower", "upper", "strip", "count", "split")
ALLOWED = (
    "must be an expression of keys of the row, texts, numbers, lists, and/or/not, comparisons, in, + - / // %, "
    f"row['odd key'], {', '.join(_FUNCTIONS)} and text methods ({', '.join(_METHODS)})"
)


def compile_filter(text: str, key: str = "task.filter") -> tuple[Callable[[Mapping[str, Any]], bool], set[str]]:
    """Return (predicate on a row, names of the keys it reads); raises ConfigError for anything else than ALLOWED.

    The predicate raises KeyError for a missing key and TypeError or ValueError for values that do not compare.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        names: set[str] = set()
        _check(tree, names)
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = f"{ALLOWED} ({getattr(error, 'msg', None) or error})"
        raise ConfigError([Mistake(key, text, reason, """For example: task.filter='level == "Level 5"'.""")]) from error
    return (lambda row: bool(_evaluate(tree, row))), names


def _check(node: ast.AST, names: set[str]) -> None:
    match node:
        case ast.Name():
            names |= {node.id} - {"row"}
        case ast.Constant():
            pass
        case ast.BoolOp(values=children) | ast.List(elts=children) | ast.Tuple(elts=children) | ast.Set(elts=children):
            for child in children:
                _check(child, names)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            _check(node.operand, names)
        case ast.BinOp() if type(node.op) in _BINARY:
            _check(node.left, names)
            _check(node.right, names)
        case ast.Compare() if all(type(op) in _COMPARE for op in node.ops):
            for child in (node.left, *node.comparators):
                _check(child, names)
        case ast.Subscript():
            _check(node.value, names)
            _check(node.slice, names)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS and not node.keywords:
            for child in node.args:
                _check(child, names)
        case ast.Call(func=ast.Attribute(attr=name, value=owner)) if name in _METHODS and not node.keywords:
            for child in (owner, *node.args):
                _check(child, names)
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed")


def _evaluate(node: ast.AST, row: Mapping[str, Any]) -> Any:
    match node:
        case ast.Name(id=name):
            return row if name == "row" and name not in row else row[name]
        case ast.Constant():
            return node.value
        case ast.BoolOp(op=ast.And()):
            return all(_evaluate(child, row) for child in node.values)
        case ast.BoolOp():
            return any(_evaluate(child, row) for child in node.values)
        case ast.List() | ast.Tuple() | ast.Set():
            return [_evaluate(child, row) for child in node.elts]
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(node.operand, row)
        case ast.UnaryOp():
            return -_evaluate(node.operand, row)
        case ast.BinOp():
            return _BINARY[type(node.op)](_evaluate(node.left, row), _evaluate(node.right, row))
        case ast.Subscript():
            return _evaluate(node.value, row)[_evaluate(node.slice, row)]
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_evaluate(child, row) for child in node.args))
        case ast.Call(func=ast.Attribute(attr=name, value=owner)):
            text = _evaluate(owner, row)
            if not isinstance(text, str):
                raise TypeError(f"{name} needs a text")
            return getattr(text, name)(*(_evaluate(child, row) for child in node.args))
        case ast.Compare():
            left = _evaluate(node.left, row)
            for op, child in zip(node.ops, node.comparators, strict=True):
                right = _evaluate(child, row)
                if not _COMPARE[type(op)](left, right):
                    return False
                left = right
            return True
    raise ValueError(f"{type(node).__name__} is not allowed")
