"""Requests about the devices: the first of a state, default assignments, default layouts."""

from __future__ import annotations

from typing import Any

from pathways.proxy import dtypes, host_arrays
from pathways.proxy.array_making import check_devices
from pathways.proxy.attributes import fill_attributes
from pathways.proxy.calls import Call, Kind
from pathways.proxy.errors import Code, Refused, not_implemented
from pathways.proxy.replies import Fill
from pathways.proxy.state import State
from pathways.quirks import quirks_of

RUNTIME = "pathways"
#: What JAX asks a backend for. Without the first one, `jax.export` fails.
CLIENT_ATTRIBUTES = {"serialize_with_sdy": True, "supports_executable_serialization": False}


def init(state: State, call: Call) -> Fill:
    """All devices, each of them addressable: to a client they are one process's."""
    machine = state.machine
    kinds = {kind: None for device in machine.devices for kind in device.memories}
    kind_numbers = {kind: number for number, kind in enumerate(kinds, 1)}

    def fill(response: Any) -> None:
        response.session_id = state.number
        response.platform_name, response.platform_version = machine.platform, machine.platform_version
        response.runtime_type = RUNTIME
        fill_attributes(CLIENT_ATTRIBUTES, response.client_attributes)
        for place, device in enumerate(machine.devices):
            made = response.all_devices.add(
                id=device.id,
                local_device_id=place,
                local_hardware_id=place,
                platform_name=machine.platform,
                device_kind=device.kind,
                debug_string=f"{machine.platform}:{device.id}",
                to_string=f"{machine.platform}:{device.id}(slice={device.slice_index}, host={device.host})",
            )
            made.attributes.SetInParent()
            attributes = {"slice_index": device.slice_index, "host": device.host, **device.attributes}
            if quirks_of(device.kind).is_host_memory:
                attributes["colocation_id"] = device.id  # it is what `colocated_cpu_devices` finds for itself
            fill_attributes(attributes, made.attributes)
            for number, kind in enumerate(device.memories):
                memory = place * len(kind_numbers) + kind_numbers[kind]
                made.memory_ids.append(memory)
                if number == 0:
                    made.default_memory_id = memory
                response.memories.add(
                    id=memory,
                    memory_space_kind=kind,
                    kind_id=kind_numbers[kind],
                    device_ids=[device.id],
                    debug_string=f"{kind} of {machine.platform}:{device.id}",
                    to_string=f"{kind} of {machine.platform}:{device.id}",
                )
            response.primary_device_ids.append(device.id)
            response.addressable_device_ids.append(device.id)

    return fill


def default_device_assignment(state: State, call: Call) -> Fill:
    """The first devices, partitions next to each other."""
    replicas, partitions = call.body.num_replicas, call.body.num_partitions
    devices = sorted(state.device_ids)
    if not 0 < replicas * partitions <= len(devices):
        raise Refused(
            Code.INVALID_ARGUMENT, f"{replicas} replicas of {partitions} partitions on {len(devices)} devices"
        )

    def fill(response: Any) -> None:
        made = response.device_assignment
        made.replica_count, made.computation_count = replicas, partitions
        for partition in range(partitions):
            chosen = [devices[replica * partitions + partition] for replica in range(replicas)]
            made.computation_devices.add(replica_device_ids=chosen)

    return fill


def default_layout(state: State, call: Call) -> Fill:
    """How an array lies on a device when nobody says."""
    body = call.body
    check_devices(state, [body.device_id])
    if any(size < 0 for size in body.dims):
        raise Refused(Code.INVALID_ARGUMENT, f"an array of shape {list(body.dims)}")
    numpy = host_arrays.numpy_of(dtypes.of_kind(body.dtype.kind))
    text = state.devices.default_layout(numpy, tuple(body.dims), body.device_id, body.memory_kind)
    return lambda response: setattr(response, "serialized_pjrt_layout", text.encode())


def host_callback(state: State, call: Call) -> Fill:
    """No stock client asks for work of its callbacks."""
    raise not_implemented("this proxy runs no callbacks of clients")


REQUESTS = {
    "init_request": Kind(init),
    "get_default_device_assignment_request": Kind(default_device_assignment),
    "get_default_layout_request": Kind(default_layout),
    "loaded_host_callback_poll_request": Kind(host_callback),
    "loaded_host_callback_return_request": Kind(host_callback),
}
