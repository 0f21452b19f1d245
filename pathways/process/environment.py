"""The environment of a host process, which tells it which devices are its own. Pure functions on dictionaries.

The client and the controller must not take a device. So these functions choose the platform from device files and
variables, and never ask JAX.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping

from pathways.errors import ConnectError
from pathways.process.config import ClusterOptions
from pathways.process.memory import memory_bytes

_DEVICE_COUNT = "--xla_force_host_platform_device_count"
_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "ROCR_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
PLATFORMS = ("cpu", *_VISIBLE)
_DEVICE_FILES = {
    "cuda": ("/dev/nvidia[0-9]*",),
    "rocm": ("/dev/dri/renderD*",),
    "tpu": ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*"),  # the second since TPU v5
}
# The devices of a file, at most: on some TPUs each core of a chip is a device.
_DEVICES_PER_FILE = {"cuda": 1, "rocm": 1, "tpu": 2}
_PLUGINS = {"cuda": ("jax_cuda12_plugin", "jax_cuda13_plugin"), "rocm": ("jax_rocm7_plugin", "jax_rocm60_plugin"),
            "tpu": ("libtpu",)}  # fmt: skip
_ALIASES = {"gpu": "cuda"}
#: Variables that let their holder into a cluster.
SECRETS = ("PATHWAYS_TOKEN", "PATHWAYS_TOKEN_FILE")
# The arrangement of the chips of one process on a TPU host, by the number of chips.
_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
_TPU_FIRST_PORT = 8476
THREADS_PER_DEVICE = 2
# How much freed memory glibc keeps. Messages of streams are allocated and freed all the time. With the defaults each
# message has page faults for all its pages, which took half of a transfer's time (4 MiB: 630 -> 310 us per MiB).
_KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": 64 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}


def choose_platform(asked: str | None, environ: Mapping[str, str]) -> str:
    """The platform of the hosts: `asked`, else `JAX_PLATFORMS`, else an accelerator of this machine, else cpu. That a
    program's JAX uses a proxy says nothing of hosts.
    """
    first = (asked or environ.get("JAX_PLATFORMS", "")).split(",")[0].strip().lower()
    if first and (asked or first != "proxy"):
        platform = _ALIASES.get(first, first)
        if platform not in PLATFORMS:
            raise ConnectError(f"platform {first!r} is unknown; expected cpu, {', '.join(_VISIBLE)} or gpu")
        return platform
    for platform, plugins in _PLUGINS.items():
        if any(importlib.util.find_spec(plugin) for plugin in plugins) and _visible(platform, environ):
            return platform
    return "cpu"


def check_shared_memory(options: ClusterOptions) -> None:
    """Raises ConnectError when the hosts' memory for transfers, fully used, would be more than the machine has.

    The memory is made with memfd_create. So the size of /dev/shm does not matter, only the memory of the machine.
    """
    needed = options.hosts * options.transfer_bytes
    there = memory_bytes()
    if options.transfer_memory is not None and needed > there:
        raise ConnectError(
            f"{options.hosts} hosts with transfer_memory={options.transfer_memory} need {needed} bytes of shared "
            f"memory, but this machine has {there} bytes of memory: ask for {there // options.hosts} at most"
        )


def check_devices(options: ClusterOptions, platform: str, environ: Mapping[str, str]) -> None:
    """Refuses a cluster that needs more accelerators than the machine has.

    Raises:
        ConnectError: the message names the devices asked for and those of the machine.
    """
    if platform == "cpu":
        return
    wanted, there = options.hosts * options.devices_per_host, _visible(platform, environ)
    if wanted > len(there) * _DEVICES_PER_FILE[platform]:
        raise ConnectError(
            f"the hosts need {wanted} {platform} devices, but this machine shows {len(there)}; ask for fewer, or for "
            "platform='cpu'"
        )


def cpu_threads(devices: int) -> int:
    """The size that XLA's thread pool needs on a host with this number of CPU devices; XLA reads it from `NPROC`.

    By default the size is the number of cores. A collective holds a thread while it waits for its peers. With only one
    thread per device, steps enqueued ahead deadlock (seen with jaxlib 0.10.2, 2 devices on 2 cores) or are very slow
    (0.12). More threads than needed make steps without collectives much slower.
    """
    return max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices if devices > 1 else 1)


def asked_cpu_devices(configured: int, environ: Mapping[str, str]) -> int:
    """The number of CPU devices that a process will have. `configured` is JAX's setting `jax_num_cpu_devices`; when it
    is not set, the environment decides.
    """
    flags = re.findall(rf"{_DEVICE_COUNT}=(\d+)", environ.get("XLA_FLAGS", ""))
    return configured if configured > 0 else int(flags[-1]) if flags else 1


def has_cpu_threads(devices: int, environ: Mapping[str, str]) -> bool:
    """Whether XLA's own thread pool is large enough for collectives of this number of CPU devices."""
    named = environ.get("NPROC", "")
    threads = int(named) if named.isdecimal() else len(os.sched_getaffinity(0))
    return devices <= 1 or threads >= THREADS_PER_DEVICE * devices


@contextlib.contextmanager
def enough_cpu_threads(devices: int, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Inside this context, XLA makes a CPU backend with as many threads as a host with `devices` devices has.

    XLA reads `NPROC` when it makes the backend, and never again. The variable is removed afterwards, because processes
    that this process starts have other devices.
    """
    if has_cpu_threads(devices, environ):
        yield
        return
    environ["NPROC"] = str(cpu_threads(devices))
    try:
        yield
    finally:
        environ.pop("NPROC", None)


def host_environment(options: ClusterOptions, platform: str, host: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of host number `host`: the given environment, with only this host's devices."""
    env = dict(environ)
    # Hosts need no token; the others would contradict our settings of the devices and the group.
    for name in (
        *SECRETS,
        "JAX_NUM_CPU_DEVICES",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_PLATFORM_NAME",
    ):
        env.pop(name, None)
    flags = [flag for flag in env.pop("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT)]
    each = options.devices_per_host
    if platform == "cpu":
        flags.append(f"{_DEVICE_COUNT}={each}")
        env.setdefault("NPROC", str(cpu_threads(each)))
        env["JAX_PLATFORMS"] = "cpu"
    else:
        there = _visible(platform, environ)
        env["JAX_PLATFORMS"] = f"{platform},cpu"
        # A process with all chips of a TPU machine is what libtpu expects, and the machine's own variables say so.
        if platform != "tpu" or each < len(there):
            env[_VISIBLE[platform]] = ",".join(there[host * each : (host + 1) * each])
            env.update(_tpu_group(options, host) if platform == "tpu" else {})
    if flags:
        env["XLA_FLAGS"] = " ".join(flags)
    if options.machines > 1:
        for name, nbytes in _KEPT_MEMORY.items():
            env.setdefault(name, str(nbytes))
    # 64-bit values stay 64-bit on the devices, in any mode of their client.
    env["JAX_ENABLE_X64"] = "1"
    # The client checks results itself, see `pathways.api.programs.value_checks`.
    env["JAX_DEBUG_NANS"] = env["JAX_DEBUG_INFS"] = "0"
    env["PYTHONUNBUFFERED"] = "1"
    return quiet_environment(env)


def fabric_variables(platform: str, interface: str) -> dict[str, str]:
    """What makes NCCL, or RCCL, use this interface only. gloo is told an address instead (`HostConfig.fabric`)."""
    return {"NCCL_SOCKET_IFNAME": f"={interface}"} if platform in ("cuda", "rocm") else {}


def torus_wraps(environ: Mapping[str, str]) -> tuple[bool, bool, bool]:
    """Along which axes the chips of this machine's TPU slice are rings, as the platform says. Where it says nothing,
    and where the torus is twisted, along none: a link that is not used costs less than one that is not there.
    """
    said = [each.strip().lower() == "true" for each in environ.get("TPU_TOPOLOGY_WRAP", "").split(",")]
    if len(said) != 3 or environ.get("TPU_TOPOLOGY_ALT", "").lower() == "true":
        return (False, False, False)
    return (said[0], said[1], said[2])


def quiet_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the C++ libraries' logging reduced, unless the user set it. Logs are shown on failure."""
    return {"TF_CPP_MIN_LOG_LEVEL": "2", "GRPC_VERBOSITY": "ERROR", **environ}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the controller: the given one, with the path of the same `pathways`, and JAX's settings.

    A setting that the user made by `jax.config`, not by a variable, becomes a variable.
    """
    env = dict(environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != root]
    env["PYTHONPATH"] = os.pathsep.join([root, *paths])
    jax = sys.modules.get("jax")
    for name in (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
        "jax_default_matmul_precision",
    ):
        value = getattr(jax.config, name, None) if jax is not None else None
        if value is not None:
            env[name.upper()] = str(value)
    return quiet_environment(env)


def _visible(platform: str, environ: Mapping[str, str]) -> list[str]:
    """The devices that this environment may use, by the names that the platform's variable uses."""
    listed = environ.get(_VISIBLE[platform])
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    files = [path for pattern in _DEVICE_FILES[platform] for path in glob.glob(pattern)]
    return [str(number) for number in range(len([path for path in files if re.search(r"\d+$", path)]))]


def _tpu_group(options: ClusterOptions, host: int) -> dict[str, str]:
    """The variables that libtpu needs when processes share one machine's TPU chips. Not yet tried on a TPU."""
    island, rank = divmod(host, options.hosts_per_island)
    first = island * options.hosts_per_island
    ports = [_TPU_FIRST_PORT + first + member for member in range(options.hosts_per_island)]
    return {
        "TPU_CHIPS_PER_PROCESS_BOUNDS": _CHIP_BOUNDS.get(options.devices_per_host, f"1,{options.devices_per_host},1"),
        "TPU_PROCESS_BOUNDS": f"{options.hosts_per_island},1,1",
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
        "TPU_PROCESS_PORT": str(ports[rank]),
        "CLOUD_TPU_TASK_ID": str(rank),
    }
