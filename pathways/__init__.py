"""Pathways for JAX: one program drives many accelerators through an asynchronous, gang-scheduled dataflow.

import pathways as pw

with pw.connect(pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=2)):
    devices = pw.make_virtual_device_set()
    left, right = devices.add_slice(devices=4), devices.add_slice(devices=4)
    double = pw.jit(lambda x: x * 2, devices=left)
    add_one = pw.jit(lambda x: x + 1, devices=right)

    @pw.program
    def both(x):
        return add_one(double(x))

    print(both(3.0))
"""

from pathways import errors
from pathways.api import checkpoint
from pathways.api.array import Array
from pathways.api.cancel import cancel
from pathways.api.connect import Cluster, LocalCluster, connect
from pathways.api.placed import jit
from pathways.api.program import program
from pathways.api.put import device_put
from pathways.api.session import make_virtual_device_set
from pathways.api.slices import Device, Slice, VirtualDeviceSet

__version__ = "0.2.0"

__all__ = [
    "Array",
    "Cluster",
    "Device",
    "LocalCluster",
    "Slice",
    "VirtualDeviceSet",
    "cancel",
    "checkpoint",
    "connect",
    "device_put",
    "errors",
    "jit",
    "make_virtual_device_set",
    "program",
]
