"""The small parts of the control plane, each alone: messages, environments, directories, the
supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways import errors
from pathways._native import StepKind
from pathways.agent import island
from pathways.cluster.address import Address
from pathways.compiler.ir import ArrayType, Computation, LogicalProgram, MeshSpec, Node, NodeKind
from pathways.plan.composite import Composite, Step
from pathways.plan.topology import SliceBinding, Topology
from pathways.process import children, config, environment, fd_passing, run_directory, supervisor
from pathways.process.config import ClusterOptions, ControllerConfig, HostConfig
from pathways.protocol import control_pb2, generate, program_pb2, wire
from pathways.protocol.serialization import dump, dump_program, load, load_dtype, load_program

# -- programs as bytes ---------------------------------------------------------------------------------------------

DTYPES = [
    np.dtype(name) for name in ("float32", "float64", "int8", "uint32", "int64", "bool", "complex64", "float16")
] + [np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.int4)]

texts = st.text(max_size=8)
flags = st.lists(st.booleans(), max_size=3).map(tuple)
axis_tuples = st.lists(st.sampled_from(["x", "y", "z"]), max_size=2, unique=True).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> LogicalProgram:
    mesh_axes = st.lists(st.tuples(texts, st.integers(1, 2**40)), max_size=3).map(tuple)
    meshes = tuple(draw(st.lists(st.builds(MeshSpec, texts, mesh_axes), min_size=1, max_size=3)))

    def array_type() -> ArrayType:
        shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=3)))
        spec = tuple(draw(axis_tuples) for _ in shape)
        return ArrayType(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, len(meshes) - 1)), spec)

    def array_types() -> tuple[ArrayType, ...]:
        return tuple(array_type() for _ in range(draw(st.integers(0, 2))))

    values = (array_type(), *array_types())
    numbers = st.lists(st.integers(0, len(values) - 1), max_size=3).map(tuple)
    computations = tuple(
        Computation(draw(texts), draw(st.binary(max_size=20)), 0, array_types(), array_types(), draw(flags))
        for _ in range(draw(st.integers(0, 2)))
    )
    nodes = []
    for _ in range(draw(st.integers(0, 3))):
        call = bool(computations) and draw(st.booleans())
        nodes.append(
            Node(
                NodeKind.CALL if call else NodeKind.TRANSFER,
                draw(texts),
                draw(st.integers(0, len(computations) - 1)) if call else -1,
                draw(numbers),
                draw(numbers),
                draw(texts),
                draw(st.integers(0, 1)),
                draw(flags),
            )
        )
    return LogicalProgram(
        draw(texts), meshes, values, computations, tuple(nodes), draw(numbers), draw(numbers), draw(flags), draw(texts)
    )


@given(programs())
def test_a_program_survives_the_wire(program: LogicalProgram) -> None:
    assert load_program(dump_program(program)) == program
    assert load_program(dump_program(program, texts=False)) == dataclasses.replace(program, mpmd_text="", ifrt_text="")


@given(programs(), st.data())
def test_broken_bytes_are_refused_or_harmless(program: LogicalProgram, data: st.DataObject) -> None:
    whole = dump_program(program)
    if not whole:
        return
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    flipped = bytearray(whole)
    flipped[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    for broken in (cut, bytes(flipped)):
        with contextlib.suppress(errors.PlanError):
            load_program(broken)


def small_program(**changes: object) -> program_pb2.LogicalProgram:
    message = program_pb2.LogicalProgram.FromString(
        dump_program(
            LogicalProgram(
                "p",
                (MeshSpec("m", (("x", 2),)),),
                (ArrayType((4,), np.dtype("float32"), 0, (("x",),)),),
                (),
                (Node(NodeKind.TRANSFER, "t", -1, (0,), (0,)),),
                (0,),
                (0,),
                (False,),
            )
        )
    )
    for name, value in changes.items():
        del getattr(message, name)[:]
        getattr(message, name).extend([value])
    return message


def test_malformed_programs_are_named() -> None:
    value = small_program().types[0]
    for broken, words in (
        (small_program(arguments=7), "no value 7: the program has 1"),
        (small_program(results=-1), "no value -1"),
        (
            small_program(types=program_pb2.ArrayType(shape=[2], dtype="float32", mesh=0)),
            "1 dimensions has a spec for",
        ),
        (small_program(types=program_pb2.ArrayType(dtype="float99", mesh=0)), "float99"),
        (small_program(types=program_pb2.ArrayType(dtype="object", mesh=0)), "object"),
        (small_program(types=program_pb2.ArrayType(dtype=value.dtype, mesh=3)), "no mesh 3"),
        (small_program(values=1), "no type 1: the program has 1"),
        (small_program(values=-1), "no type -1"),
        (small_program(nodes=program_pb2.Node(kind=program_pb2.Node.CALL, computation=0)), "no computation 0"),
        (small_program(nodes=program_pb2.Node(name="odd")), "'odd' is of unknown kind 0"),
    ):
        with pytest.raises(errors.PlanError) as refusal:
            load_program(broken.SerializeToString())
        assert words in str(refusal.value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_element_types_come_back(dtype: np.dtype) -> None:
    assert load_dtype(dtype.name) == dtype


def test_a_program_too_long_for_a_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathways.protocol.serialization.MAX_PROGRAM_BYTES", 10)
    module = Computation("f", b"x" * 20, 0, (), (), ())
    with pytest.raises(errors.PlanError, match="constants as arguments"):
        dump_program(LogicalProgram("p", (MeshSpec("m", ()),), (), (module,), (), (), (), ()))


def test_generated_messages_match_the_protos() -> None:
    for name in generate.SOURCES:
        proto = generate.FOLDER / name
        for generated in generate.FOLDER.glob(f"{proto.stem}_pb2*.py*"):
            assert generated.read_text().startswith(generate.header(proto)), f"run generate.py: {generated.name} is old"
        assert not re.findall(r"\w+_json\b.*", proto.read_text()), "a message, not JSON inside of one"


def test_topology_and_bindings_cross_the_wire() -> None:
    topology = Topology(((0, 1), (2,)), 4, "cuda", "1", "2", coordinates=((0, 1, 2, 0, 1), ()))
    assert load(dump(topology, control_pb2.Topology), Topology) == topology
    binding = SliceBinding(3, (2, 2), ("a", "b"), 1, (8, 9, 10, 11), (2,), 5)
    data = dump(binding, control_pb2.SliceBinding).SerializeToString()
    assert load(control_pb2.SliceBinding.FromString(data), SliceBinding) == binding


def test_a_program_with_loops_crosses_the_wire_and_a_kind_that_nobody_knows_is_refused() -> None:
    steps = tuple(Step(kind, n, (0, n), (n + 1,)) for n, kind in enumerate(StepKind))
    composite = Composite(1, 6, (0,), (5,), steps, 10)
    message = dump(composite, program_pb2.Composite)
    assert load(program_pb2.Composite.FromString(message.SerializeToString()), Composite) == composite
    for kind in (0, 6):  # of a client that has other messages
        message.steps[1].kind = kind
        with pytest.raises(errors.PlanError, match=f"compositestep is of unknown kind {kind}"):
            load(message, Composite)


def test_errors_keep_their_class_across_the_wire() -> None:
    assert type(wire.make_error("SliceError", "x")) is errors.SliceError
    strange = wire.make_error("SystemExit", "x")
    assert type(strange) is errors.PathwaysError and str(strange) == "SystemExit: x"


def test_configurations_survive_the_command_line() -> None:
    cluster = ControllerConfig(ClusterOptions(2, 2, 2, "cpu"), "cpu", "/d", 1, 2, 3)
    assert config.load_controller(config.dump(cluster)) == cluster
    host = HostConfig(
        3, cluster.options, "cpu", "unix:/a", "unix:/c", (2, 3), 2, parent=1, segment_fds=(5, 6), socket_fd=7
    )
    assert config.load_host(config.dump(host)) == host
    assert host.rank == 1 and host.devices == range(6, 8) and host.hosts_here == 4
    assert dataclasses.replace(host, device_count=1).devices == range(6, 7)
    far = dataclasses.replace(host, segment_fds=(), streams=("a@h:1", None, ""), epochs=(3, 0, -1))
    assert config.load_host(config.dump(far)) == far


def test_an_agent_gets_the_configuration_of_its_host() -> None:
    options = ClusterOptions(3, 2, 1, "cpu")
    host = HostConfig(
        3, options, "cpu", "", "", (2, 3), incarnation=2, predecessor_failure="lost", predecessor_client=5, machine=2
    )
    host = dataclasses.replace(host, streams=("a@h:1", "", None, None, "", "b@h:2"), epochs=(3, -1, 2, 2, -1, 0))
    request = island.start_of(host, "secret")
    assert request.token == "secret" and island.config_of(request, options, "cpu", [2, 3], [2, 3], 1) == host
    assert [peer.host for peer in request.peers] == [0, 5], "hosts that are not there take no bytes"
    alone = HostConfig(0, ClusterOptions(1, 1, 1, "cpu"), "cpu", "", "", (0,), machine=1, streams=(None,), epochs=(0,))
    assert island.config_of(island.start_of(alone, ""), alone.options, "cpu", [0], [0], 1) == alone
    later = HostConfig(
        1, ClusterOptions(0, 1, 8, max_machines=4), "cpu", "", "", (1,), 5, streams=("a@h:1", None), epochs=(0, 0)
    )
    assert island.config_of(island.start_of(later, ""), later.options, "cpu", [1], [1], 5) == later, "hosts so far"


# -- processes -----------------------------------------------------------------------------------------------------


def test_exits_are_described() -> None:
    assert children.describe_exit(3) == "ended with exit status 3"
    assert children.describe_exit(-9) == "was killed by SIGKILL"
    assert children.describe_exit(-60) == "was killed by signal 60"


def test_log_tails(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(b"line %d" % number for number in range(100_000)) + b"\n\xff\n")
    tail = children.log_tail(str(log), 3)
    assert tail.splitlines() == ["The last lines of its log:", "    line 99998", "    line 99999", "    �"]
    log.write_bytes(b"\n")
    assert children.log_tail(str(log)) == "Its log is empty."
    moment = "2026-11-30T17:47:09.313Z"
    routine = [f"{moment} INFO host 0 has its devices, 0, 1"]
    routine.append(f'{{"time": "{moment}", "level": "info", "process": "host 0", "logger": "pathways", "message": ""}}')
    log.write_text("\n".join(routine))
    assert children.log_tail(str(log)) == "Its log has no warning."
    others = [
        f"{moment} WARNING host 0 m",
        routine[1].replace('"pathways"', '"stdout"'),
        '{"time": "',
        f"at {moment} INFO it was printed",
    ]
    log.write_text("\n".join([*routine, *others, routine[0]]))
    assert [line.strip() for line in children.log_tail(str(log)).splitlines()[1:]] == others
    assert "cannot be read" in children.log_tail(str(tmp_path / "none"))


def test_a_child_dies_with_its_parent() -> None:
    """Also the parent that was gone before the child could ask."""
    child = (
        "import os, sys, time; from pathways.process.children import *; die_with_parent(os.getppid()); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    environ = environment.child_environment(os.environ)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    pidfd = os.pidfd_open(int(process.stdout.readline()))
    process.kill()
    process.wait()
    assert supervisor.wait_readable(pidfd, 10.0), "the child outlived its parent"
    os.close(pidfd)
    process.stdout.close()
    with pytest.raises(children.ParentLost):
        subprocess_with_wrong_parent()


def subprocess_with_wrong_parent() -> None:
    code = "from pathways.process.children import *\ntry: die_with_parent(1)\nexcept ParentLost: print('lost')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment.child_environment(os.environ)
    )
    if done.stdout.strip() == "lost":
        raise children.ParentLost


# -- environments --------------------------------------------------------------------------------------------------


def test_cpu_hosts_get_their_devices_and_nobody_elses_settings() -> None:
    given = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_cpu_use_thunk_runtime=true",
        "JAX_NUM_CPU_DEVICES": "3",
        "JAX_COORDINATOR_ADDRESS": "elsewhere:1",
        "JAX_PLATFORMS": "cuda",
        "KEPT": "yes",
    }
    env = environment.host_environment(ClusterOptions(1, 2, 4), "cpu", 1, given)
    assert env["JAX_PLATFORMS"] == "cpu" and env["KEPT"] == "yes"
    assert env["XLA_FLAGS"] == "--xla_cpu_use_thunk_runtime=true --xla_force_host_platform_device_count=4"
    assert "JAX_NUM_CPU_DEVICES" not in env and "JAX_COORDINATOR_ADDRESS" not in env
    assert int(env["NPROC"]) >= 8, "threads for collectives that wait"
    assert environment.host_environment(ClusterOptions(), "cpu", 0, {"NPROC": "5"})["NPROC"] == "5"
    assert given["JAX_PLATFORMS"] == "cuda", "the caller's environment is not touched"


def test_cpu_devices_that_a_process_will_have() -> None:
    twice = "--xla_force_host_platform_device_count=3 --xla_cpu=1 --xla_force_host_platform_device_count=5"
    assert environment.asked_cpu_devices(-1, {}) == 1
    assert environment.asked_cpu_devices(-1, {"XLA_FLAGS": twice}) == 5, "XLA takes the last"
    assert environment.asked_cpu_devices(2, {"XLA_FLAGS": twice}) == 2, "JAX's own setting goes first"


def test_threads_for_collectives_are_asked_for_while_the_backend_is_made() -> None:
    many = os.cpu_count() or 1
    environ = {"KEPT": "yes"}
    with environment.enough_cpu_threads(many, environ):
        assert environ == {"KEPT": "yes", "NPROC": str(environment.cpu_threads(many))} or many == 1
    assert environ == {"KEPT": "yes"}
    with environment.enough_cpu_threads(1, environ):
        assert environ == {"KEPT": "yes"}, "one device waits for nobody"
    assert not environment.has_cpu_threads(4, {"NPROC": "7"}) and environment.has_cpu_threads(4, {"NPROC": "8"})


def test_accelerators_are_split_between_hosts() -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,5,GPU-6,7", "JAX_PLATFORMS": "cuda"}
    wanted = ClusterOptions(2, 1, 2)
    assert environment.choose_platform(None, given) == "cuda"
    environment.check_devices(wanted, "cuda", given)
    devices = [environment.host_environment(wanted, "cuda", host, given)["CUDA_VISIBLE_DEVICES"] for host in range(2)]
    assert devices == ["4,5", "GPU-6,7"]
    assert environment.host_environment(wanted, "cuda", 0, given)["JAX_PLATFORMS"] == "cuda,cpu"
    with pytest.raises(errors.ConnectError, match=r"need 6 cuda devices, but this machine shows 4.*platform='cpu'"):
        environment.check_devices(ClusterOptions(3, 1, 2), "cuda", given)


def test_tpu_hosts_of_an_island_form_a_group() -> None:
    env = environment.host_environment(ClusterOptions(2, 2, 1), "tpu", 3, {"TPU_VISIBLE_CHIPS": "0,1,2,3"})
    assert env["TPU_VISIBLE_CHIPS"] == "3" and env["CLOUD_TPU_TASK_ID"] == "1"
    assert env["TPU_PROCESS_ADDRESSES"] == "localhost:8478,localhost:8479" and env["TPU_PROCESS_PORT"] == "8479"


def test_a_tpu_host_with_all_chips_of_its_machine_keeps_what_the_platform_has_set() -> None:
    given = {"TPU_VISIBLE_CHIPS": "0,1,2,3", "TPU_WORKER_ID": "7", "TPU_PROCESS_ADDRESSES": "a,b"}
    env = environment.host_environment(ClusterOptions(1, 16, 4), "tpu", 0, given)
    assert given.items() <= env.items() and "CLOUD_TPU_TASK_ID" not in env
    environment.check_devices(ClusterOptions(1, 1, 8), "tpu", given)  # each core of a chip may be a device
    with pytest.raises(errors.ConnectError, match="this machine shows 4"):
        environment.check_devices(ClusterOptions(1, 1, 9), "tpu", given)


def test_tpu_chips_are_found_by_their_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0", "1", "vfio"):
        (tmp_path / name).touch()
    monkeypatch.setitem(environment._DEVICE_FILES, "tpu", (f"{tmp_path}/accel[0-9]*", f"{tmp_path}/[0-9]*"))
    environment.check_devices(ClusterOptions(1, 1, 2), "tpu", {})
    with pytest.raises(errors.ConnectError, match="this machine shows 2"):
        environment.check_devices(ClusterOptions(1, 1, 5), "tpu", {})


def test_platforms_are_asked_for_or_found() -> None:
    assert environment.choose_platform("gpu", {}) == "cuda"
    assert environment.choose_platform("cpu", {"JAX_PLATFORMS": "cuda"}) == "cpu"
    assert environment.choose_platform(None, {"JAX_PLATFORMS": "proxy,cpu"}) == environment.choose_platform(None, {})
    with pytest.raises(errors.ConnectError, match="'quantum' is unknown; expected cpu, cuda, rocm, tpu or gpu"):
        environment.choose_platform("quantum", {})


# -- directories and addresses -------------------------------------------------------------------------------------


def test_addresses(tmp_path: pathlib.Path) -> None:
    server = fd_passing.listen(str(tmp_path / "control.sock"))
    expected = Address(f"unix:{tmp_path}/control.sock", f"{tmp_path}/fds.sock")
    for address in (f"unix:{tmp_path}/control.sock", f"unix:{tmp_path}", f"unix://{tmp_path}/control.sock"):
        assert Address.parse(address) == expected
    server.close()
    (tmp_path / "file").touch()
    for address, words in (
        ("localhost:1", "expected an address like unix:/path"),
        ("unix:", "expected an address"),
        (f"unix:{tmp_path}/nobody", "No such file or directory. `pathways up`"),
        (f"unix:{tmp_path}/file", "is no socket"),
    ):
        with pytest.raises(errors.ConnectError) as refusal:
            Address.parse(address)
        assert words in str(refusal.value)


def test_dead_directories_are_swept_and_live_ones_are_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(run_directory, "_bases", lambda: [str(tmp_path)])
    old = time.time() - 1000
    made = []
    for name in ("dead", "live", "new"):
        path = tmp_path / f"pathways-{os.getuid()}-{name}"
        path.mkdir()
        (path / "lock").touch()
        os.utime(path, (time.time(), time.time()) if name == "new" else (old, old))
        made.append(path)
    with open(made[1] / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_directory.sweep()
        assert [path.exists() for path in made] == [False, True, True]
        assert run_directory.live_clusters() == [f"unix:{made[1]}/control.sock"]
    assert run_directory.live_clusters() == []


def test_directories_fit_a_socket_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/x" * 60)
    assert len(run_directory.new_directory() + "/island-10000.sock") < 108


# -- the supervisor ---------------------------------------------------------------------------------------------------


def run_supervisor(
    path: pathlib.Path, owner_fd: int, code: str, grace_s: float = 0.2
) -> tuple[int, list[dict[str, object]]]:
    """Runs a supervisor over a stand-in for the controller; its status and its reports."""
    read_fd, write_fd = os.pipe()
    argument = {
        "directory": str(path),
        "command": [sys.executable, "-c", code],
        "owner_fd": owner_fd,
        "report_fd": write_fd,
        "grace_s": grace_s,
    }
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", supervisor.__file__, json.dumps(argument)], pass_fds=(owner_fd, write_fd)
    )
    os.close(write_fd)
    status = process.wait(30)
    with open(read_fd) as reports:
        return status, [json.loads(line) for line in reports]


def test_the_supervisor_removes_what_a_dead_controller_left(tmp_path: pathlib.Path) -> None:
    """Its directory, and a grandchild that nobody else knows."""
    orphan = "import os, subprocess, sys, time; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    code = f"{orphan}; print('the orphan is', p.pid, flush=True); os.kill(os.getpid(), 9)"
    pidfd = os.pidfd_open(os.getpid())
    status, reports = run_supervisor(tmp_path / "d", pidfd, code)
    os.close(pidfd)
    assert status == 128 + 9 and not (tmp_path / "d").exists()
    assert [report["event"] for report in reports] == ["spawned", "ended"]
    words = str(reports[1]["log"])
    assert reports[1]["returncode"] == -9 and words.startswith("the orphan is")
    assert not os.path.exists(f"/proc/{words.split()[-1]}")


def test_the_supervisor_says_how_a_controller_ended_whose_log_is_gone(tmp_path: pathlib.Path) -> None:
    pidfd = os.pidfd_open(os.getpid())
    code = f"import shutil, sys; shutil.rmtree({str(tmp_path / 'd')!r}); sys.exit(3)"
    status, reports = run_supervisor(tmp_path / "d", pidfd, code)
    os.close(pidfd)
    assert status == 3
    assert reports[-1] == {"event": "ended", "returncode": 3, "log": ""}


def test_the_supervisor_ends_a_controller_that_outlives_the_owner(tmp_path: pathlib.Path) -> None:
    owner = subprocess.Popen(["sleep", "3"])  # time for the supervisor to start what it guards
    pidfd = os.pidfd_open(owner.pid)
    status, _ = run_supervisor(tmp_path / "d", pidfd, "import time; time.sleep(1000)")
    os.close(pidfd)
    owner.wait()
    assert status == 128 + 9 and not (tmp_path / "d").exists()


def test_the_supervisor_of_an_owner_already_gone_makes_nothing(tmp_path: pathlib.Path) -> None:
    owner = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(owner.pid)
    owner.wait()
    status, reports = run_supervisor(tmp_path / "d", pidfd, "raise SystemExit(5)")
    os.close(pidfd)
    assert (status, reports) == (0, [])


def test_the_supervisor_says_when_it_cannot_make_the_directory(tmp_path: pathlib.Path) -> None:
    pidfd = os.pidfd_open(os.getpid())
    _, reports = run_supervisor(tmp_path / "no" / "such", pidfd, "pass")
    os.close(pidfd)
    assert "No such file or directory" in str(reports[0]["message"])


def test_more_shared_memory_than_there_is_is_refused_at_the_start() -> None:
    too_much = 1 << 50
    with pytest.raises(errors.ConnectError, match=rf"need {2 * too_much} bytes of shared memory.*ask for"):
        environment.check_shared_memory(ClusterOptions(islands=2, transfer_memory=too_much))
    environment.check_shared_memory(ClusterOptions(islands=2, transfer_memory=1 << 20))
