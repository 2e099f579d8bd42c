"""CUDA_VISIBLE_DEVICES in every spelling that is legal, and in some that are not."""

import pytest

from retraind.worker.gpu_facts import GpuFacts
from retraind.worker.visible import choose, entries

MIG = "MIG-11111111-0000-0000-0000-000000000000"
GPUS = [
    GpuFacts(index=0, uuid="GPU-aaaa0000"),
    GpuFacts(index=1, uuid="GPU-bbbb1111", mig_uuids=[MIG, "MIG-2222"]),
    GpuFacts(index=2, code=15),
    *(GpuFacts(index=index, uuid=f"GPU-cccc{index}") for index in range(3, 12)),
]


@pytest.mark.parametrize(
    ("value", "index", "device"),
    [
        (None, 0, "GPU-aaaa0000"),
        ("0", 0, "GPU-aaaa0000"),
        ("00", 0, "GPU-aaaa0000"),
        (" 0 , 1", 0, "GPU-aaaa0000"),
        ("3,0", 3, "GPU-cccc3"),
        ("11", 11, "GPU-cccc11"),
        ("0,0", 0, "GPU-aaaa0000"),
        ("GPU-aaaa0000,GPU-aaaa0000", 0, "GPU-aaaa0000"),
        ("GPU-aaaa", 0, "GPU-aaaa0000"),
        ("0,-1,1", 0, "GPU-aaaa0000"),
        ("1", 1, MIG),
        ("GPU-bbbb", 1, MIG),
        ("MIG-2222", 1, "MIG-2222"),
        ("MIG-GPU-bbbb1111/3/0", 1, "MIG-GPU-bbbb1111/3/0"),
        ("2", 2, ""),
        ("12", None, ""),
        ("1.5", None, ""),
        ("\u0661", None, ""),
        ("0x1", None, ""),
        ("NoDevFiles", None, ""),
        ("GPU-dddd", None, ""),
        ("MIG-3333", None, ""),
        ("", None, ""),
        (",0", None, ""),
        ("-1", None, ""),
        ("-1,0", None, ""),
    ],
)
def test_the_first_device_that_may_be_seen_is_chosen(value, index, device):
    choice = choose(GPUS, value)
    assert (choice.gpu and choice.gpu.index, choice.device) == (index, device)


def test_a_machine_without_gpus_has_none_to_choose():
    assert choose([], None).gpu is choose([], "0").gpu is None


@pytest.mark.parametrize(
    ("value", "named"),
    [(None, None), ("", []), ("-1", []), ("-1,3", []), ("3,,4", ["3"]), (" GPU-a , MIG-b ", ["GPU-a", "MIG-b"])],
)
def test_the_list_ends_where_cuda_ends_it(value, named):
    assert entries(value) == named
