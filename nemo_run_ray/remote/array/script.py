"""Whether the script that launches an array has to run where its functions do.

NeMo-Run's runner runs it before each task. It imports NeMo-Run, which takes seconds, and 80 MB that
each fork copies. A script that only defines things and launches does nothing for a function that
lies in a module.
"""

from __future__ import annotations

import ast
import sys
from typing import Any, Iterator, Set, Tuple

#: What a script launches with.
_LAUNCHING = {"fiddle", "nemo_run", "nemo_run_ray"}
#: Calls of these make values and change nothing.
_MAKERS = {"dict", "float", "frozenset", "int", "len", "list", "range", "set", "str", "tuple"}
_PARTS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Starred)
_NAMES = (ast.Constant, ast.Name, ast.Attribute, ast.Lambda)


def has_to_run(script: str, config: Any) -> bool:
    """Whether a script may do something that a task needs.

    Args:
        script: its text.
        config: the task in Fiddle's JSON.
    """
    named = set(_symbols(config))
    if any(module in ("__main__", "__external_main__") for module, _ in named):
        return True
    try:
        body = ast.parse(script).body
    except (SyntaxError, ValueError, RecursionError):
        return True  # it says itself what is wrong
    return not all(_does_nothing(statement, named) for statement in body)


def _symbols(tree: Any) -> Iterator[Tuple[str, str]]:
    """Modules and names of the Python objects that are named in Fiddle's JSON."""
    if isinstance(tree, dict):
        if isinstance(tree.get("module"), str) and isinstance(tree.get("name"), str):
            yield tree["module"], tree["name"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _symbols(value)


def _does_nothing(statement: ast.stmt, named: Set[Tuple[str, str]]) -> bool:
    """Whether a statement at the top does nothing that is seen outside of the script."""
    if isinstance(statement, ast.Import):
        return all(_is_known(alias.name, named) for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        return not statement.level and all(
            _gives_known(str(statement.module), alias.name, named) for alias in statement.names
        )
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = [*statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        return not statement.decorator_list and all(map(_is_value, given))
    if isinstance(statement, ast.ClassDef):  # a base may note each of its classes
        apart = not (statement.decorator_list or statement.bases or statement.keywords)
        return apart and all(_does_nothing(one, named) for one in statement.body)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        are_names = all(isinstance(target, ast.Name) for target in targets)
        return are_names and (statement.value is None or _is_value(statement.value))
    if isinstance(statement, ast.If):
        return _is_guard(statement.test) and not statement.orelse
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _is_known(module: str, named: Set[Tuple[str, str]]) -> bool:
    """Whether the task imports a module too, or it is only for launching or Python's own."""
    return _is_neutral(module) or any(f"{one}.".startswith(f"{module}.") for one, _ in named)


def _gives_known(module: str, name: str, named: Set[Tuple[str, str]]) -> bool:
    """``_is_known`` for one name of a module, which may be a module itself."""
    return (module, name) in named or _is_known(f"{module}.{name}", named)


def _is_neutral(module: str) -> bool:
    top = module.partition(".")[0]
    return top in _LAUNCHING or top in sys.stdlib_module_names


def _is_guard(test: ast.expr) -> bool:
    """``__name__ == "__main__"``, or ``TYPE_CHECKING``: false where NeMo-Run runs a script."""
    text = ast.unparse(test)
    return text in ("__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING")


def _is_value(value: ast.expr) -> bool:
    """Whether an expression only makes a value."""
    if isinstance(value, ast.Call):
        is_maker = isinstance(value.func, ast.Name) and value.func.id in _MAKERS
        parts = [*value.args, *(keyword.value for keyword in value.keywords)]
        return is_maker and all(map(_is_value, parts))
    if isinstance(value, _PARTS):
        children = [one for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr)]
        return all(map(_is_value, children))
    return isinstance(value, _NAMES)
