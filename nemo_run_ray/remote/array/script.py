"""Whether the script that launches an array has to run where its functions do.

NeMo-Run's runner runs it before each task. It imports NeMo-Run, which takes seconds, and 80 MB that
each fork copies. A script that only defines things and launches does nothing for a function that
lies in a module, but for what it defines: that is there when somebody asks ``__main__`` for it.
"""

from __future__ import annotations

import ast
import os
import sys
import warnings
from importlib.util import find_spec
from typing import Any, Callable, Iterator, Optional, Set, Tuple

#: What a script launches with.
_LAUNCHING = {"fiddle", "nemo_run", "nemo_run_ray"}
#: Calls of these make values and change nothing.
_BUILTINS = {
    *("bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range", "set"),
    *("sorted", "str", "sum", "tuple", "zip"),
}
_MAKERS = {"Path", "logging.getLogger", "os.environ.get", "os.getenv", "pathlib.Path", *_BUILTINS}
_DATACLASSES = {"dataclass", "dataclasses.dataclass"}
_BASES = {"Enum", "NamedTuple", "enum.Enum", "typing.NamedTuple"}
_PARTS = (
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.Starred, ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Subscript, ast.Slice),
)
_NAMES = (ast.Constant, ast.Name, ast.Attribute, ast.Lambda)
#: False where NeMo-Run runs a script.
_GUARDS = {"__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING"}


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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the user's text
            body = ast.parse(script).body
        for statement in body:
            if isinstance(statement, ast.ImportFrom) and statement.level:
                return False  # it fails where NeMo-Run runs a script, and nothing behind it runs
            if not _does_nothing(statement, named):
                return True
    except (ImportError, MemoryError, RecursionError, SyntaxError, ValueError):
        return True  # it says itself what is wrong
    return False


def offer(load: Callable[[], None]) -> None:
    """Run the script when somebody asks ``__main__`` for a name of it."""
    main = sys.modules["__main__"]

    def look(name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for many of these
            raise AttributeError(f"module '__main__' has no attribute {name!r}")
        del main.__dict__["__getattr__"]
        load()
        return getattr(main, name)

    main.__dict__["__getattr__"] = look


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
    """Whether a statement at the top does nothing but to define names."""
    if isinstance(statement, ast.Import):
        return all(_is_known(alias.name, named) for alias in statement.names)
    if isinstance(statement, ast.ImportFrom):
        module = str(statement.module)
        return all(_gives_known(module, alias.name, named) for alias in statement.names)
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        is_plain = not statement.decorator_list and statement.name not in _BUILTINS
        return is_plain and _is_signature(statement.args, statement.returns)
    if isinstance(statement, ast.ClassDef):  # a base may note each of its classes
        apart = all(_dotted(base) in _BASES for base in statement.bases) and not statement.keywords
        apart = apart and all(map(_is_dataclass, statement.decorator_list))
        return apart and all(_does_nothing(one, named) for one in statement.body)
    if isinstance(statement, ast.Assign):
        return all(map(_is_new_name, statement.targets)) and _is_value(statement.value)
    if isinstance(statement, ast.AnnAssign):
        is_typed = _is_new_name(statement.target) and _is_type(statement.annotation)
        return is_typed and (statement.value is None or _is_value(statement.value))
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test) in _GUARDS and not statement.orelse
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


# ---------------------------------------------------------------------- imports


def _is_known(module: str, named: Set[Tuple[str, str]]) -> bool:
    """Whether the task imports a module too, or it is only for launching or Python's own."""
    return _is_neutral(module) or any(f"{one}.".startswith(f"{module}.") for one, _ in named)


def _gives_known(module: str, name: str, named: Set[Tuple[str, str]]) -> bool:
    """``_is_known`` for one name of a module, which may be a module itself."""
    if (module, name) in named or _is_known(f"{module}.{name}", named):
        return True
    if not any(module == one for one, _ in named):
        return False
    spec = find_spec(module)
    return spec is not None and spec.submodule_search_locations is None


def _is_neutral(module: str) -> bool:
    top = module.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return top in _LAUNCHING
    spec = find_spec(top)  # a file of the user's may have the name of one
    origin = str(spec.origin) if spec is not None else ""
    return origin in ("built-in", "frozen") or origin.startswith(os.path.dirname(os.__file__))


# ---------------------------------------------------------------------- definitions


def _is_new_name(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_is_new_name, target.elts))
    return isinstance(target, ast.Name) and target.id not in _BUILTINS


def _is_signature(args: ast.arguments, returns: Optional[ast.expr]) -> bool:
    given = [*args.defaults, *filter(None, args.kw_defaults)]
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    types = [returns, *(one.annotation for one in named if one is not None)]
    return all(map(_is_value, given)) and all(map(_is_type, filter(None, types)))


def _is_type(annotation: ast.expr) -> bool:
    return not any(isinstance(part, ast.Call) for part in ast.walk(annotation))


def _is_dataclass(decorator: ast.expr) -> bool:
    if not isinstance(decorator, ast.Call):
        return _dotted(decorator) in _DATACLASSES
    return _dotted(decorator.func) in _DATACLASSES


def _is_value(value: ast.expr) -> bool:
    """Whether an expression only makes a value."""
    if isinstance(value, ast.Call):
        parts = [*value.args, *(keyword.value for keyword in value.keywords)]
        return _dotted(value.func) in _MAKERS and all(map(_is_value, parts))
    if isinstance(value, _PARTS):
        children = [one for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr)]
        return all(map(_is_value, children))
    return isinstance(value, _NAMES)


def _dotted(expression: ast.expr) -> str:
    """A name with its dots, or a text that is no name."""
    return ast.unparse(expression)
