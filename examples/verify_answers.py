"""CPU work from a server with an event loop: answers to arithmetic exercises are verified on Ray.

The server takes answers over HTTP and never blocks: each is verified by a worker, on whichever node
has room. Some answers make the verifier run for ever: their workers are ended, and the others do
not notice.

    python examples/verify_answers.py [ip:port or ray://host:10001]
"""

import ast
import asyncio
import json
import operator
import random
import sys
from typing import Any

from nemo_run_ray import work

ANSWERS = 200
#: Seconds for one answer.
LIMIT_S = 2.0
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_OPERATIONS |= {ast.Pow: operator.pow, ast.Div: operator.truediv}


def verify(exercise: dict[str, Any]) -> bool:
    """Whether the expression of an answer has the value that was asked for."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            found: float = _OPERATIONS[type(node.op)](value(node.left), value(node.right))
            return found
        raise ValueError(f"{ast.unparse(node)} is no arithmetic")

    return value(ast.parse(exercise["answer"], mode="eval").body) == exercise["wanted"]


async def serve(pool: work.Pool) -> asyncio.Server:
    """A server that takes one exercise a line and answers with a verdict."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                right = await pool.call(verify, json.loads(line), timeout_s=LIMIT_S)
                verdict = "right" if right else "wrong"
            except work.TimedOut:
                verdict = "took too long"
            except work.WorkerDied:  # of a lack of memory, or with its node
                verdict = "not verified"
            except (ValueError, SyntaxError, ArithmeticError) as error:
                verdict = f"not an answer: {error}"
            writer.write(f"{verdict}\n".encode())
            await writer.drain()
        writer.close()

    return await asyncio.start_server(talk, "127.0.0.1", 0)


def answers(chance: random.Random) -> list[dict[str, Any]]:
    """Right and wrong ones, no answers, and some whose value nobody can wait for."""
    found = []
    for number in range(ANSWERS):
        one, other = chance.randrange(100), chance.randrange(100)
        text = f"{one} * {other} + {number}"
        wanted = one * other + number + (number % 7 == 0)
        if number % 50 == 49:
            text = "9 ** 9 ** 9 ** 9"
        elif number % 31 == 30:
            text = "import os"
        found.append({"answer": text, "wanted": wanted})
    return found


async def ask(port: int, exercises: list[dict[str, Any]]) -> list[str]:
    """The verdicts of the server, asked through one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = []
    for exercise in exercises:
        writer.write(json.dumps(exercise).encode() + b"\n")
        found.append((await reader.readline()).decode().strip())
    writer.close()
    return found


async def main(pool: work.Pool) -> None:
    server = await serve(pool)
    port = server.sockets[0].getsockname()[1]
    exercises = answers(random.Random(1))
    # Eight clients at the same time.
    parts = await asyncio.gather(*(ask(port, exercises[start::8]) for start in range(8)))
    verdicts = [verdict.partition(":")[0] for part in parts for verdict in part]
    for verdict in sorted(set(verdicts)):
        print(f"{verdicts.count(verdict):4} {verdict}")
    server.close()


if __name__ == "__main__":
    with work.connect(*sys.argv[1:2]) as connected:
        asyncio.run(main(connected))
