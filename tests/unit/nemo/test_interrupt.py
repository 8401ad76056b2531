"""What Ctrl-C says."""

import os
import signal

import pytest

from nemo_run_ray.errors import NemoRunRayError
from nemo_run_ray.nemo.scheduler import Interrupt


def test_ctrl_c_names_the_experiment():
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt.watch("an experiment_1")
        with pytest.raises(KeyboardInterrupt, match="Nothing of 'an experiment_1' was submitted"):
            os.kill(os.getpid(), signal.SIGINT)
        interrupt.watch("an experiment_1")
        interrupt.forbid()  # its jobs are submitted now
        with pytest.raises(KeyboardInterrupt, match="nemo-run-ray status 'an experiment_1'"):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(NemoRunRayError, match="are not sent"):
            interrupt.forbid()
        interrupt.unwatch()
        interrupt.forbid()  # the next run is not interrupted
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
