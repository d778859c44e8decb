"""What a server's process changes of itself before it serves."""

import sys

from tiered_kv.server.daemonize import SWITCH_S, let_loop_answer


def test_the_loop_waits_for_no_thread_that_computes() -> None:
    before_s = sys.getswitchinterval()
    try:
        let_loop_answer()
        assert sys.getswitchinterval() <= 2 * SWITCH_S < 0.001
    finally:
        sys.setswitchinterval(before_s)
