"""Checks that several dataclasses of this package share."""

import ast
import dataclasses
import difflib
import functools
import os
import re
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, NoReturn, TypeVar

from nemo_run_ray.errors import ConfigError
from nemo_run_ray.ids import LEDGER

_Class = TypeVar("_Class")
#: Last words of the names of credentials, as in ``HF_TOKEN``, ``X-Api-Key``, ``PGPASSWORD``.
_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:TOKEN|\w*API_?KEYS?|KEY|PAT|PASS|PASSCODE|PW|SECRETS?|AUTH|AUTHORIZATION|BEARER"
    r"|COOKIE|CREDENTIALS?|CREDS|JWT|DSN|CONNECTION_STRING|SECRET_KEY_BASE|AUTH_CONFIG"
    r"|(?:ACCESS|AUTH|PRIVATE)_(?:KEYS|TOKENS)|SSHPASS)"
    r"|.*(?:PASSWORD|PASSWD|PASSPHRASE)|.+_PWD"
    r"|(?:.*_)?WEBHOOK_UR[LI]"
)
#: Names of addresses that often have a password in them.
_ADDRESS = re.compile(
    r"(?:.*_)?(?:DATABASE|DB|POSTGRES|POSTGRESQL|PG|MYSQL|MONGO|MONGODB|REDIS|AMQP|RABBITMQ|BROKER)"
    r"_UR[LI]"
)
#: Names of other things that end so: a data set's columns, a tokenizer's tokens, switches.
_NO_CREDENTIAL = re.compile(
    r"(?:.*_)?(?:PUBLIC|PRIMARY|FOREIGN|SORT|PARTITION|CACHE|INPUT|OUTPUT|PROMPT|LABEL|TEXT|IMAGE"
    r"|DATA|ANSWER|TARGET)_KEY"
    r"|(?:.*_)?(?:PAD|EOS|BOS|UNK|MASK|STOP|SEP|CLS|PER|IMAGE|START|END|SPECIAL)_TOKEN"
    r"|(?:.*_)?(?:ENABLE|DISABLE|USE|NO|REQUIRE|SKIP|MAX|MIN|NUM)_\w+|(?:FIRST|SECOND)_PASS"
    r"|OLD_?PWD"
)
#: A user and a password in an address.
_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
#: Values that are no credentials: a switch, a path, a placeholder.
_NO_VALUE = re.compile(r"|[01]|true|false|yes|no|/.*|<[^<>]*>|empty|none|dummy", re.IGNORECASE)
#: Names that may be those of a column, which a word names.
_COLUMN = re.compile(r".*(?<!API)(?<!ACCESS)(?<!SECRET)(?<!PRIVATE)_KEY")
_WORD = re.compile("[a-z_]+")
#: Above every amount and every number of seconds; larger numbers do not fit a float's arithmetic.
AMOUNT_MAX = 1e18
#: Control characters, which no address, path or header may hold.
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
#: A label's name or value, and what Ray takes as a condition for one: ``a``, ``!a``, ``in(a, b)``.
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[a-zA-Z0-9._-]{{1,253}}/)?{_LABEL}")
LABELS = (
    "values by label, such as {'zone': 'a'}, {'zone': '!a'} or {'zone': 'in(a, b)'}; names and "
    "values have at most 63 letters, digits, '-', '_' and '.'"
)
_LABEL_CONDITION = re.compile(rf"!?{_LABEL}|!?(?:in)?\({_LABEL}(?:, ?{_LABEL})*\)|")
#: The name under which NeMo-Run runs a program's ``__main__`` again (``maybe_load_external_main``).
_AGAIN = "__external_main__"
_GUARD = 'Put what starts the run below `if __name__ == "__main__":`.'


def is_amount(value: Any) -> bool:
    """Whether it is a finite number from 0, and no bool."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and bool(0 <= value <= AMOUNT_MAX)


def is_whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number between these, and no bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least <= value and (most is None or value <= most)


def are_labels(value: Any) -> bool:
    """Whether Ray takes it as a label selector; of another one it says so only to a job."""
    return isinstance(value, Mapping) and all(
        isinstance(key, str)
        and isinstance(text, str)
        and _LABEL_KEY.fullmatch(key)
        and _LABEL_CONDITION.fullmatch(text)
        for key, text in value.items()
    )


def looks_like_credential(name: str) -> bool:
    """Whether a variable or a header of this name holds a credential."""
    words = re.sub(r"_?\d+$", "", name.upper().replace("-", "_"))
    found = _CREDENTIAL.fullmatch(words) or _ADDRESS.fullmatch(words)
    return bool(found and not _NO_CREDENTIAL.fullmatch(words))


def credentials_in(variables: Mapping[str, Any]) -> list[str]:
    """Names of the variables that hold a credential, by the name or in an address."""
    return [name for name, value in variables.items() if _is_credential(str(name), str(value))]


def refuse_credentials(what: str, variables: Mapping[str, Any]) -> None:
    """Refuse variables that hold a credential.

    Args:
        what: gives them, for the message.
        variables: values by name.

    Raises:
        ConfigError: one looks like a credential.
    """
    for name in credentials_in(variables):
        raise ConfigError(
            f"{what} gives {name}, which looks like a credential (its value is not shown here) and "
            "would lie in clear in the experiment's folder, and on the cluster where others can "
            f"read it. Give RayExecutor(secrets=[{name!r}]), which takes the value from your "
            "environment and writes it nowhere."
        )


def _is_credential(name: str, value: str) -> bool:
    if _IN_ADDRESS.search(value):
        return True
    if not looks_like_credential(name) or _ADDRESS.fullmatch(name.upper()):
        return False
    is_column = _COLUMN.fullmatch(name.upper()) and _WORD.fullmatch(value)
    return not (is_column or _NO_VALUE.fullmatch(value))


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    """Raise for a field of RayExecutor that has a wrong value."""
    raise ConfigError(f"RayExecutor.{name} is {value!r}; allowed is {allowed}.")


def version_of(text: str) -> tuple[int, ...]:
    """The first two numbers of a version, to be compared."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def nearest(name: object, known: Iterable[str]) -> str | None:
    """What is meant by a name that is not known, if one is like it, also in another case."""
    by_lower = {word.lower(): word for word in known}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None


def strict_init(cls: type[_Class]) -> type[_Class]:
    """A dataclass whose constructor refuses unknown fields by a ``ConfigError``.

    The signature stays that of the fields: NeMo-Run's command line and fiddle read it.
    """
    construct: Any = cls.__init__
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    known = [field.name for field in fields if field.init]
    unnamed = [field.name for field in fields if field.init and not field.kw_only]
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if len(args) > len(unnamed):
            raise ConfigError(
                f"{cls.__name__} takes its fields by name; found {args[len(unnamed)]!r} without "
                f"one. It has {', '.join(known)}."
            )
        for name in kwargs:
            if name not in known:
                meant = nearest(name, known)
                hint = f"did you mean {meant!r}?" if meant else f"it has {', '.join(known)}."
                raise ConfigError(f"{cls.__name__} has no field {name!r}; {hint}")
        for name in unnamed[: len(args)]:
            if name in kwargs:
                raise ConfigError(f"{cls.__name__} got {name!r} twice, once without its name.")
        missing = [name for name in unnamed[len(args) :] if name in required - kwargs.keys()]
        if missing:
            raise ConfigError(f"{cls.__name__} needs {', '.join(missing)}.")
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def check_name(what: str, name: str) -> None:
    """Refuse a name of which NeMo-Run makes several folders.

    It looks for the task's script, and for an experiment, in one folder.
    """
    if "/" in name:
        raise ConfigError(
            f"The name of the {what} {name!r} has a '/', and NeMo-Run makes folders of such names "
            f"and then does not find them. Choose another name, such as {name.replace('/', '-')!r}."
        )


def check_launch(exp_id: str, exp_dir: str) -> None:
    """Refuse what was launched already: the same experiment, or the same program.

    NeMo-Run runs a program again to find the functions of its ``__main__``. On a node it would
    launch itself, and wait for its own end; and a look at an experiment would launch it anew.

    Args:
        exp_id: of the experiment that a job is added to.
        exp_dir: its folder.

    Raises:
        ConfigError: it has run, or the launch is by top-level code of a program that runs again.
    """
    if os.path.exists(os.path.join(exp_dir, LEDGER)):
        raise ConfigError(
            f"The experiment {exp_id} has run already: {exp_dir} holds its ledger {LEDGER}. Choose "
            f"another id, or look at the old run with `nemo-run-ray status {exp_id}`."
        )
    frame = _top_level(_AGAIN)
    if frame is not None:
        raise ConfigError(
            f"{frame.f_code.co_filename}, line {frame.f_lineno}, launches what was launched "
            "already: NeMo-Run runs this program again to find the functions of its __main__. "
            f"{_GUARD}"
        )


def check_guard() -> None:
    """Refuse to launch a function of ``__main__`` from a line that runs again before it is found.

    The node runs the whole program again, which would fail at that line. A program that looks at
    its ``__name__``, and a line below a condition or ``try``, are not refused.

    Raises:
        ConfigError: the launch is by top-level code of the program.
    """
    frame = _top_level("__main__")
    if frame is None:
        return
    file, line = frame.f_code.co_filename, frame.f_lineno
    try:
        with open(file, encoding="utf-8") as program:
            tree = ast.parse(program.read())
    except (OSError, ValueError, SyntaxError):
        return  # a notebook's cell, or standard input: no program that runs again
    compared = (node for node in ast.walk(tree) if isinstance(node, ast.Compare))
    if any("'__name__'" in ast.dump(node) for node in compared):
        return
    for statement in tree.body:
        is_there = statement.lineno <= line <= (statement.end_lineno or 0)
        if is_there and not isinstance(statement, (ast.If, ast.Try, ast.Match)):
            raise ConfigError(
                f"{file}, line {line}, launches a function of its own program, and the node runs "
                f"that program again to find the function. {_GUARD}"
            )


def _top_level(module: str) -> FrameType | None:
    """The frame of the top-level code of a module, if that code has led here."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == module and frame.f_code.co_name == "<module>":
            return frame
        frame = frame.f_back
    return None
