"""Programming exercises: solutions as a model might give them, and the tests they are to pass."""

from typing import NamedTuple


class Exercise(NamedTuple):
    name: str
    solution: str
    test: str
    passes: bool = True


EXERCISES = [
    Exercise(
        "greatest common divisor",
        """
def gcd(a, b):
    while b:
        a, b = b, a % b
    return a
""",
        "assert gcd(48, 36) == 12 and gcd(17, 5) == 1 and gcd(0, 7) == 7",
    ),
    Exercise(
        "prime numbers",
        """
def primes(limit):
    composite = set()
    for number in range(2, limit):
        if number not in composite:
            yield number
            composite.update(range(number * number, limit, number))
""",
        "assert list(primes(20)) == [2, 3, 5, 7, 11, 13, 17, 19]",
    ),
    Exercise(
        "Roman numerals",
        """
def roman(number):
    digits = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL",
              10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}
    text = ""
    for value, letters in digits.items():
        count, number = divmod(number, value)
        text += letters * count
    return text
""",
        "assert [roman(n) for n in (4, 49, 1994)] == ['IV', 'XLIX', 'MCMXCIV']",
    ),
    Exercise(
        "balanced brackets",
        """
def balanced(text):
    open_ones = []
    for one in text:
        if one in "([{":
            open_ones.append(one)
        elif one in ")]}" and (not open_ones or open_ones.pop() + one not in ("()", "[]", "{}")):
            return False
    return not open_ones
""",
        "assert balanced('a(b[c]{d})') and not balanced('(]') and not balanced('((')",
    ),
    Exercise(
        "edit distance",
        """
def distance(a, b):
    row = list(range(len(b) + 1))
    for i, left in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, right in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
    return row[-1]
""",
        "assert distance('kitten', 'sitting') == 3 and distance('', 'ab') == 2",
    ),
    Exercise(
        "median, wrong for an even count",
        """
def median(numbers):
    return sorted(numbers)[len(numbers) // 2]
""",
        "assert median([3, 1, 2]) == 2\nassert median([4, 1, 3, 2]) == 2.5",
        passes=False,
    ),
    Exercise(
        "Collatz steps, endless for 0",
        """
def steps(number):
    count = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        count += 1
    return count
""",
        "assert steps(6) == 8\nassert steps(0) == 0",
        passes=False,
    ),
    Exercise(
        "sum of squares, all in memory",
        """
def squares(limit):
    numbers = list(range(limit + 1))
    return sum(number * number for number in numbers)
""",
        "assert squares(10) == 385\nassert squares(10**9) == 333333333833333333500000000",
        passes=False,
    ),
]
