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

import importlib
from typing import TYPE_CHECKING

from pathways import errors

if TYPE_CHECKING:
    from pathways.api import nn
    from pathways.api.arrays.array import Array
    from pathways.api.arrays.place import place
    from pathways.api.arrays.put import device_put
    from pathways.api.arrays.variables import Variable
    from pathways.api.cancel import cancel
    from pathways.api.checkpoints import checkpoint
    from pathways.api.connect import Cluster, connect
    from pathways.api.initialize import initialize
    from pathways.api.local_target import LocalCluster
    from pathways.api.pipelines.gradients import accumulate_gradients
    from pathways.api.pipelines.pipeline import pipeline
    from pathways.api.profiling import profile
    from pathways.api.programs.decorator import program
    from pathways.api.programs.exchange import exchange
    from pathways.api.programs.host_callbacks import HostObject, host_callback
    from pathways.api.programs.placed import jit
    from pathways.api.programs.while_loop import while_loop
    from pathways.api.ray_target import RayCluster
    from pathways.api.recording import trace
    from pathways.api.session import make_virtual_device_set
    from pathways.api.slices.virtual_devices import Device, Slice, VirtualDeviceSet

__version__ = "0.2.0"

__all__ = [
    "Array",
    "Cluster",
    "Device",
    "HostObject",
    "LocalCluster",
    "RayCluster",
    "Slice",
    "Variable",
    "VirtualDeviceSet",
    "accumulate_gradients",
    "cancel",
    "checkpoint",
    "connect",
    "device_put",
    "errors",
    "exchange",
    "host_callback",
    "initialize",
    "jit",
    "make_virtual_device_set",
    "nn",
    "pipeline",
    "place",
    "profile",
    "program",
    "trace",
    "while_loop",
]

# Where each name is, in pathways.api. A program's first use of a name imports that module, and JAX with it. The
# controller's process uses no name, and does without both.
_PLACES = {
    "Array": "arrays.array",
    "Cluster": "connect",
    "Device": "slices.virtual_devices",
    "HostObject": "programs.host_callbacks",
    "LocalCluster": "local_target",
    "RayCluster": "ray_target",
    "Slice": "slices.virtual_devices",
    "Variable": "arrays.variables",
    "VirtualDeviceSet": "slices.virtual_devices",
    "accumulate_gradients": "pipelines.gradients",
    "cancel": "cancel",
    "checkpoint": "checkpoints.checkpoint",
    "connect": "connect",
    "device_put": "arrays.put",
    "exchange": "programs.exchange",
    "host_callback": "programs.host_callbacks",
    "initialize": "initialize",
    "jit": "programs.placed",
    "make_virtual_device_set": "session",
    "nn": "nn",
    "pipeline": "pipelines.pipeline",
    "place": "arrays.place",
    "profile": "profiling",
    "program": "programs.decorator",
    "trace": "recording",
    "while_loop": "programs.while_loop",
}

if not TYPE_CHECKING:

    def __getattr__(name):
        if name in ("checkpoint", "nn"):
            found = importlib.import_module(f"pathways.api.{_PLACES[name]}")
        elif name in _PLACES:
            found = getattr(importlib.import_module(f"pathways.api.{_PLACES[name]}"), name)
        else:
            raise AttributeError(f"module 'pathways' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__():
        return sorted({*globals(), *__all__})
