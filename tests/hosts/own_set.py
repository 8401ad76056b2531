"""Sets of hosts that belong to one test process alone, beside those of other runs and checkouts."""

import socket

#: Below are the numbers that people give by hand.
_NUMBERS = range(20, 250)


def claim() -> str:
    """The number of a set of hosts that no other living test process has, for ``TESTBED``.

    What a process that was killed has left under the number is still there: call ``down`` first.
    """
    for number in _NUMBERS:
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0nemo-run-ray-testbed-{number}")
        except OSError:  # another process has it
            held.close()
            continue
        held.detach()  # it stays open; the kernel frees the name however this process ends
        return str(number)
    raise RuntimeError(f"all sets of hosts from {_NUMBERS[0]} to {_NUMBERS[-1]} are in use")
