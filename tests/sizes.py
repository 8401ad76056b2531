"""Sizes of the folders: ``python -m tests.sizes`` prints them, ``--write`` updates ``sizes.txt``.

A folder may become smaller without a word; a commit that makes one larger says why.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTED = Path(__file__).with_name("sizes.txt")
_NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def tokens_of(text: str) -> int:
    """The names, operators and literals of a module, without imports and docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and body:
            node = body[0]
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text:
            skipped.update(range(node.lineno, node.end_lineno + 1))
    count = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        # Since Python 3.12 an f-string is many tokens; before, it was one.
        name = tokenize.tok_name[token.type]
        depth -= name == "FSTRING_END"
        if depth == 0 and name != "FSTRING_START" and token.type not in _NOT_CODE:
            count += token.start[0] not in skipped
        depth += name == "FSTRING_START"
    return count


def sizes() -> dict[str, tuple[int, int, int]]:
    """Modules, lines and tokens by folder; of the tests the lines alone, all in one row."""
    rows: dict[str, tuple[int, int, int]] = {}
    for path in sorted((ROOT / "nemo_run_ray").rglob("*.py")):
        folder = path.parent.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        new = (path.name != "__init__.py", text.count("\n"), tokens_of(text))
        rows[folder] = tuple(map(sum, zip(rows.get(folder, (0, 0, 0)), new, strict=True)))
    lines = sum(p.read_text(encoding="utf-8").count("\n") for p in ROOT.glob("tests/**/*.py"))
    return {**rows, "tests": (0, lines, 0)}


def noted() -> dict[str, tuple[int, int, int]]:
    """What ``sizes.txt`` says."""
    rows = [line.split() for line in NOTED.read_text(encoding="utf-8").splitlines()[1:]]
    return {name: (int(m), int(lines), int(tokens)) for m, lines, tokens, name in rows}


def table() -> str:
    """The sizes as text, as ``sizes.txt`` has it."""
    head = f"{'modules':>7} {'lines':>6} {'tokens':>7} folder"
    rows = [f"{m:7} {lines:6} {tokens:7} {name}" for name, (m, lines, tokens) in sizes().items()]
    return "\n".join([head, *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
    if "--write" in sys.argv:
        NOTED.write_text(table(), encoding="utf-8")
