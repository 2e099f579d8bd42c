"""What the kernel says of GPUs, from written-down trees."""

import os

import pytest
from gpus import ADDRESS, add_gpu, gpu_machine, write

from retraind.worker import gpu_machine as machine
from retraind.worker.gpu_facts import Link, Machine, Xid


@pytest.fixture
def root(tmp_path):
    return gpu_machine(tmp_path)


def test_a_machine_on_which_all_is_well_is_read(root):
    assert machine.gather(root) == Machine(
        addresses=(ADDRESS,),
        module_version="550.54.15",
        is_module_loaded=True,
        bound_drivers={ADDRESS: ""},
        kernel_release="6.12.0-test",
        links={ADDRESS: Link(width=16, max_width=16, generation=1, max_generation=4)},
        xids=(),
        memory_available=8 * 2**30,
    )


def test_a_machine_that_tells_nothing_has_no_gpu(tmp_path):
    found = machine.gather(tmp_path)
    assert (found.addresses, found.has_gpu, found.xids, found.memory_available) == ((), False, None, None)


def test_gpus_are_found_by_maker_and_class(tmp_path):
    add_gpu(tmp_path, "0000:65:00.0")
    add_gpu(tmp_path, "0000:01:00.0", "0x030000")
    add_gpu(tmp_path, "0000:01:00.1", "0x040300")  # its sound
    write(tmp_path / "sys/bus/pci/devices/0000:00:1f.0", {"vendor": "0x8086\n", "class": "0x030000\n"})
    assert machine.gpu_addresses(tmp_path) == ("0000:01:00.0", "0000:65:00.0")


def test_a_bus_that_can_not_be_read_is_told_from_one_that_is_empty(tmp_path):
    write(tmp_path, {"sys/bus/pci/devices": "no directory"})
    assert machine.gpu_addresses(tmp_path) is None


def test_a_narrow_port_bounds_the_width_that_a_card_can_have(tmp_path):
    add_gpu(tmp_path, port_width=8)
    assert machine.gather(tmp_path).links[ADDRESS].max_width == 8


@pytest.mark.parametrize(("text", "width"), [("16\n", 16), ("0\n", None), ("255\n", None), ("Unknown\n", None)])
def test_a_link_that_the_kernel_can_not_tell_is_none(tmp_path, text, width):
    device = add_gpu(tmp_path)
    (device / "current_link_width").write_text(text)
    assert machine.gather(tmp_path).links[ADDRESS].width == width


def test_the_driver_that_is_bound_to_a_card_is_known(root):
    (root / "sys/bus/pci/drivers/nouveau").mkdir(parents=True)
    (root / "sys/module/nouveau").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / ADDRESS / "driver").symlink_to(root / "sys/bus/pci/drivers/nouveau")
    found = machine.gather(root)
    assert (found.bound_drivers, found.is_nouveau_loaded) == ({ADDRESS: "nouveau"}, True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n", "570.86.15"),
        ("", ""),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(tmp_path, text, version):
    write(tmp_path, {"proc/driver/nvidia/version": text})
    assert machine.driver_version(tmp_path) == version


def test_the_modules_own_version_stands_in(tmp_path):
    write(tmp_path, {"sys/module/nvidia/version": "535.104.05\n"})
    assert machine.driver_version(tmp_path) == "535.104.05"


@pytest.mark.parametrize(("file", "platform"), [("dev/dxg", "wsl"), ("sys/module/nvgpu/refcnt", "jetson")])
def test_a_gpu_may_be_on_no_bus(tmp_path, file, platform):
    write(tmp_path, {file: ""})
    found = machine.gather(tmp_path)
    assert (found.platform, found.has_gpu) == (platform, True)


LOG = """\
6,1,1000000,-;Linux version 6.12
4,700,99400000000,-;NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
 SUBSYSTEM=pci
4,701,99500000000,-;NVRM: Xid (PCI:0000:65:00.0): 31, pid=4242, name=python, MMU Fault
4,702,x,-;NVRM: Xid (PCI:0000:66:00): 48, no time
"""


def test_the_drivers_errors_are_read_with_card_number_and_age(root):
    (root / "dev/kmsg").write_text(LOG)
    assert machine.gather(root).xids == (Xid("0000:65:00", 79, 600.0), Xid("0000:65:00", 31, 500.0))


def test_a_log_that_can_not_be_read_tells_nothing(root):
    (root / "dev/kmsg").unlink()
    (root / "dev/kmsg").mkdir()
    assert machine.gather(root).xids is None
    (root / "dev/kmsg").rmdir()
    assert machine.gather(root).xids is None


def test_a_log_without_a_clock_tells_nothing(root):
    (root / "proc/uptime").write_text("\n")
    assert machine.gather(root).xids is None


def test_the_end_of_the_kernels_ring_is_not_waited_for(root):
    (root / "dev/kmsg").unlink()
    os.mkfifo(root / "dev/kmsg")
    writer = os.open(root / "dev/kmsg", os.O_RDWR)  # open at both ends: a read finds nothing and no end
    os.write(writer, LOG.encode())
    assert len(machine.gather(root).xids) == 2
    os.close(writer)
