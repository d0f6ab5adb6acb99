"""Traces of several threads choose the kernel of attention together, and restore what was chosen before."""

from __future__ import annotations

import threading

import torch

from vescale.pipeline._trace import math_attention


def chosen() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()


def test_scopes_that_overlap() -> None:
    before = chosen()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with math_attention():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with math_attention():
        assert chosen() == (False, False, True, False)
        thread.start()
        assert inside.wait(10)
    assert chosen() == (False, False, True, False)  # the other thread traces on
    leave.set()
    thread.join()
    assert chosen() == before != (False, False, True, False)
