"""The last check before CUDA is used: what a CPU can show of it, and on a machine with a GPU the rest."""

import threading

import pytest
import torch

from retraind.report import Check
from retraind.worker import cuda_context

CPU = torch.device("cpu")
PASSED = Check(name=cuda_context.NAME, status="pass", message="well")


def test_a_build_without_cuda_says_so():
    if torch.version.cuda is not None:
        pytest.skip("this torch is built with CUDA")
    check = cuda_context.look()
    assert (check.name, check.status, check.message) == ("cuda.context", "fail", "torch is a build without CUDA")
    assert check.remedy


def test_the_product_is_exact_where_the_arithmetic_is_sound():
    assert cuda_context._compute(CPU).status == "pass"


@pytest.mark.parametrize("wrong", [1.0, float("nan")])
def test_a_card_that_computes_wrongly_fails(monkeypatch, wrong):
    moved = []

    def to(tensor, device):
        """The second matrix arrives damaged on the card."""
        moved.append(tensor)
        return tensor + (wrong if len(moved) == 2 else 0.0)

    monkeypatch.setattr(torch.Tensor, "to", to)
    check = cuda_context._compute(CPU)
    assert (check.status, "is off by" in check.message) == ("fail", True)


def test_a_check_that_hangs_is_given_up():
    release = threading.Event()

    def hang():
        release.wait(60)
        return PASSED

    check = cuda_context.within(0.1, hang)
    assert (check.status, check.message) == ("fail", "no answer within 0.1 s")
    release.set()


def test_an_answer_in_time_is_the_answer():
    assert cuda_context.within(60, lambda: PASSED) == PASSED


@pytest.mark.parametrize(
    ("error", "says", "remedy"),
    [
        (
            RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA"),
            "no kernel image",
            "build",
        ),
        (RuntimeError("CUDA error: device busy\nmore"), "CUDA error: device busy", "driver"),
        (MemoryError(), "MemoryError", "driver"),
    ],
)
def test_an_error_is_told_in_one_line(error, says, remedy):
    def work():
        raise error

    check = cuda_context.within(60, work)
    assert (check.status, says in check.message, "\n" in check.message) == ("fail", True, False)
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("capability", "architectures", "has"),
    [
        ((8, 6), ["sm_70", "sm_80", "sm_90"], True),
        ((8, 0), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((6, 1), ["sm_70", "sm_80"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((7, 0), ["compute_80"], False),
        ((12, 0), ["sm_100", "sm_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["gfx906", ""], False),
    ],
)
def test_a_card_needs_code_of_its_generation_or_code_that_can_be_translated(capability, architectures, has):
    assert cuda_context.has_kernels(capability, architectures) == has


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_computes_what_the_cpu_does_and_gives_its_memory_back():
    before = torch.cuda.memory_reserved()
    check = cuda_context.look(torch.cuda.device_count())
    assert check.status == "pass", check
    assert torch.cuda.memory_reserved() == before
    assert cuda_context.look(torch.cuda.device_count() + 1).status == "fail"
