"""A crew of the soak: a few threads of one client that work at random and compare with NumPy. See `soak.py`.

A crew works on slices of its own, which cover a host wholly or partly. A thread puts arrays, calls programs that it has
made up (`soak_programs.py`), with deadlines or without, trains in loops that donate their state and reads their losses
late, cancels, moves arrays and slices, reads, deletes, forks, and holds for each array what NumPy says that it is. Each
action draws from the thread's own generator, which hangs on the seed, the phase and the thread alone.

What fails must have a reason: a lost host of an island that the value came by, a deadline that was asked for, a
cancelled run, memory that is full. Everything else is a `Mismatch`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import os
import random
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from soak_programs import DTYPES, MODULUS, SHAPES, SLICES, Plan, random_plan, spec_for

import pathways as pw

MESHES = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2))
FORK_S = 20.0
HELD = 10
PROGRAMS = 4


class Mismatch(AssertionError):
    """Something is not what plain NumPy, or the contract about failures, says."""


@dataclasses.dataclass(eq=False)
class Call:
    """One call, whose results may fail for a reason of its own: it has a deadline, or it was cancelled since."""

    timed: bool = False
    cancelled: bool = False


@dataclasses.dataclass
class Held:
    """An array, what it should be, and why it may have failed: the slices and the calls that it came by. `made_by`: the
    last of these, if it was made by one."""

    array: Any
    want: np.ndarray
    slices: frozenset[int]
    calls: frozenset[Call]
    made_by: Call | None


class Crew:
    """Threads of one client that work while a phase lasts."""

    def __init__(self, cluster: Any, name: str, seed: int, threads: int) -> None:
        self.cluster, self.name, self.seed, self.threads = cluster, name, seed, threads
        self.counts: collections.Counter[str] = collections.Counter()
        self.lost: set[tuple[int, int]] = set()  # (host, pid) that errors named
        self.mismatches: list[str] = []
        draw = random.Random(f"{seed}/{name}")
        devices = pw.make_virtual_device_set(cluster)
        islands = [n % len(cluster.islands) for n in range(SLICES)]
        self.meshes = [draw.choice(self._fitting()) for _ in range(SLICES)]
        self.slices = [
            devices.add_slice(shape=shape, axis_names=("x", "y"), island=island)
            for shape, island in zip(self.meshes, islands, strict=True)
        ]
        self.reach = [{island} for island in islands]  # by slice: the islands that it has lain on in this phase
        self.beats: dict[int, float] = {}  # by thread at work: when it last did something
        self.diaries: dict[int, collections.deque[str]] = {}  # by thread: its last actions
        self.moving = threading.Lock()
        self._stop = threading.Event()
        self._running: list[threading.Thread] = []

    def _fitting(self) -> list[tuple[int, int]]:
        """The meshes that an island has devices for."""
        devices = len(self.cluster.devices) // len(self.cluster.islands)
        return [mesh for mesh in MESHES if mesh[0] * mesh[1] <= devices]

    def start(self, phase: int) -> None:
        """New slices, and threads that use them."""
        draw = random.Random(f"{self.seed}/{self.name}/{phase}")
        devices = pw.make_virtual_device_set(self.cluster)
        places = [(draw.choice(self._fitting()), draw.randrange(len(self.cluster.islands))) for _ in range(SLICES)]
        self.meshes = [shape for shape, _ in places]
        self.slices = [devices.add_slice(shape=shape, axis_names=("x", "y"), island=island) for shape, island in places]
        self.reach = [{island} for _, island in places]
        self._stop.clear()
        self._running = [
            threading.Thread(target=Worker(self, f"{self.seed}/{self.name}/{phase}/{number}").run, args=(number,))
            for number in range(self.threads)
        ]
        for thread in self._running:
            thread.start()

    def pause(self) -> dict[str, Any]:
        """Ends the phase: nothing is held any more. Counts, and what this client still has."""
        self._stop.set()
        for thread in self._running:
            thread.join()
        self._running = []
        self.cluster.operations = None
        self.cluster.moves.clear()
        jax.clear_caches()
        gc.collect()
        self.cluster.native.flush()
        return {
            "counts": dict(self.counts),
            "lost": sorted(self.lost),
            "mismatches": self.mismatches,
            "kept": self.kept(),
        }

    def kept(self) -> dict[str, int]:
        """What a client has when nothing is left: zeros."""
        gc.collect()
        self.cluster.sweep()
        self.cluster.native.flush()
        native = self.cluster.native
        return {
            "futures": native.futures_in_use,
            "in_flight": native.in_flight,
            "arena_bytes": native.arena_stats()[0],
        }

    @property
    def stopping(self) -> bool:
        return self._stop.is_set() or bool(self.mismatches)

    def islands(self, slices: frozenset[int]) -> set[int]:
        return set().union(*(self.reach[number] for number in slices))


class Worker:
    """One thread of a crew."""

    def __init__(self, crew: Crew, seed: str) -> None:
        self.crew = crew
        self.seed = seed
        self.draw = random.Random(seed)
        self.held: list[Held] = []
        self.programs: list[tuple[Plan, Any]] = []
        self.diary: collections.deque[str] = collections.deque(maxlen=30)

    def run(self, number: int) -> None:
        calls = (self.call, self.call, self.call, self.call, self.train)
        actions = (self.put, *calls, self.read, self.read, self.move, self.delete)
        rare = (self.remap, self.forget, self.operator, self.cancel, self.cancel, self.fork)
        try:
            while not self.crew.stopping:
                self.crew.beats[number] = time.monotonic()
                action = self.draw.choice(rare if self.draw.random() < 0.04 else actions)
                action()
                self.crew.counts["actions"] += 1
                while len(self.held) > HELD:
                    self.drop(self.draw.choice(self.held))
            for held in self.held if self.draw.random() < 0.5 else ():
                self.crew.beats[number] = time.monotonic()
                self.check(held)
        except BaseException as error:
            text = f"{self.seed}: {type(error).__name__}: {error}"
            diary = "\n  ".join(self.diary)
            if not isinstance(error, Mismatch):
                text += f"\n{''.join(traceback.format_exception(error))}"
            self.crew.mismatches.append(f"{text}\nlast actions:\n  {diary}")
            print(f"MISMATCH {self.crew.mismatches[-1]}\n", end="", flush=True)
        finally:
            self.crew.beats.pop(number, None)
            self.held.clear()
            self.programs.clear()

    # ---- actions

    def put(self, shape: Any = None, dtype: Any = None) -> Held | None:
        shape = self.draw.choice(SHAPES) if shape is None else shape
        dtype = self.draw.choice(DTYPES) if dtype is None else dtype
        value = self.value(shape, dtype)
        number = self.draw.randrange(SLICES)
        spec = spec_for(self.draw, shape, self.crew.meshes[number])
        self.diary.append(f"put {shape} {dtype.__name__} on {number} {spec}")
        slices = frozenset([number])
        array = self.attempt(slices, frozenset(), lambda: pw.device_put(value, self.crew.slices[number], spec))
        return self.hold(array, value, slices)

    def call(self) -> None:
        if len(self.programs) < PROGRAMS and (not self.programs or self.draw.random() < 0.1):
            plan = random_plan(self.draw, self.crew.meshes)
            self.programs.append((plan, plan.build(self.crew.slices)))
        plan, program = self.draw.choice(self.programs)
        arguments: list[Any] = []
        for shape in plan.shapes:
            fits = [held for held in self.held if held.want.shape == shape and held.want.dtype == plan.dtype]
            if fits and self.draw.random() < 0.7:
                arguments.append(self.draw.choice(fits))
            elif self.draw.random() < 0.5:
                arguments.append(self.value(shape, plan.dtype))
            else:
                held = self.put(shape, plan.dtype)
                if held is None:
                    return
                arguments.append(held)
        given = [argument for argument in arguments if isinstance(argument, Held)]
        slices = frozenset(step.slice for step in plan.steps).union(*(held.slices for held in given))
        call = Call()
        if self.draw.random() < 0.15:
            seconds = self.draw.choice((1e-5, 1e-3, 0.02, 100.0))
            call.timed, program = True, program.with_timeout(seconds)
        calls = frozenset([call]).union(*(held.calls for held in given))
        self.diary.append(f"call {plan}, timed {call.timed}")
        self.crew.counts["calls"] += 1
        values = [argument.array if isinstance(argument, Held) else argument for argument in arguments]
        results = self.attempt(slices, calls, lambda: program(*values))
        self.held = [held for held in self.held if not held.array.is_deleted()]
        if results is None:
            return
        wants = plan.oracle(*(arg.want if isinstance(arg, Held) else arg for arg in arguments))
        for array, want in zip(results, wants, strict=True):
            self.hold(array, want, slices, calls, call)

    def train(self) -> None:
        """A loop that donates its state; some of its losses are kept, and read whenever (LOOK-1)."""
        number = self.draw.randrange(SLICES)
        slice_, side = self.crew.slices[number], self.draw.choice((12, 64, 256))
        in_front = self.draw.random() < 0.7

        def step(state: Any) -> tuple[Any, Any]:
            loss = state.max()
            return (state + 1, loss) if in_front else (loss, state + 1)

        spec = spec_for(self.draw, (side, side), self.crew.meshes[number])
        placed = pw.jit(step, devices=slice_, donate_argnums=0, in_shardings=(spec,), name="train")
        call = Call()
        slices, calls = frozenset([number]), frozenset([call])
        length = self.draw.randint(2, 40)
        self.diary.append(f"train {length} steps of {side} on {number} {spec}")
        state = self.attempt(slices, calls, lambda: pw.device_put(np.zeros((side, side), np.float32), slice_, spec))
        for i in range(length):
            if state is None:
                return
            results = self.attempt(slices, calls, functools.partial(placed, state))
            if results is None:
                return
            state, loss = results if in_front else results[::-1]
            self.crew.counts["steps"] += 1
            if self.draw.random() < 0.3:
                self.hold(loss, np.asarray(i, np.float32), slices, calls, call)
        self.hold(state, np.full((side, side), length, np.float32), slices, calls, call)

    def cancel(self) -> None:
        """What comes by this array's run may fail from now on."""
        if self.held:
            held = self.draw.choice(self.held)
            self.diary.append("cancel")
            if held.made_by is not None:
                held.made_by.cancelled = True
            self.attempt(held.slices, held.calls, lambda: pw.cancel(held.array))
            self.drop(held)

    def fork(self) -> None:
        """A child that drops all that it inherited of this thread's, and ends: the parent must not notice."""
        self.diary.append("fork")
        self.crew.counts["forks"] += 1
        pid = os.fork()
        if pid == 0:
            self.held.clear()
            self.programs.clear()
            os._exit(0)
        deadline = time.monotonic() + FORK_S
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                raise Mismatch(f"a forked child that drops arrays did not end in {FORK_S:g} s")
            time.sleep(0.01)

    def read(self) -> None:
        if self.held:
            held = self.draw.choice(self.held)
            how = self.draw.random()
            if how < 0.2:
                self.diary.append("copy_to_host_async")
                self.attempt(held.slices, held.calls, held.array.copy_to_host_async)
            elif how < 0.3:
                self.diary.append("is_ready")
                self.attempt(held.slices, held.calls, held.array.is_ready)
            elif how < 0.4:
                self.diary.append("block_until_ready")
                if self.attempt(held.slices, held.calls, held.array.block_until_ready) is None:
                    self.drop(held)
            else:
                self.check(held)

    def move(self) -> None:
        """To another slice, or another sharding."""
        if self.held:
            held = self.draw.choice(self.held)
            number = self.draw.randrange(SLICES)
            spec = spec_for(self.draw, held.want.shape, self.crew.meshes[number])
            self.diary.append(f"move to {number} {spec}")
            call = Call()
            slices, calls = held.slices | {number}, held.calls | {call}
            target = self.crew.slices[number]
            array = self.attempt(slices, calls, lambda: pw.device_put(held.array, target, spec))
            self.hold(array, held.want, slices, calls, call)

    def delete(self) -> None:
        if self.held:
            held = self.draw.choice(self.held)
            self.diary.append("delete")
            if self.draw.random() < 0.5:
                held.array.delete()
            self.drop(held)

    def operator(self) -> None:
        """Ordinary use of an array."""
        fits = [held for held in self.held if held.want.shape == (64, 64)]
        if fits:
            held = self.draw.choice(fits)
            self.diary.append("operator")
            call = Call()
            calls = held.calls | {call}
            array = self.attempt(held.slices, calls, lambda: held.array[::2] * 0 + held.array[1::2])
            self.hold(array, held.want[1::2], held.slices, calls, call)

    def forget(self) -> None:
        if self.programs:
            self.diary.append("forget a program")
            del self.programs[self.draw.randrange(len(self.programs))]

    def remap(self) -> None:
        number = self.draw.randrange(SLICES)
        cluster, slice_ = self.crew.cluster, self.crew.slices[number]
        island = self.draw.randrange(len(cluster.islands))
        ids = [device.id for device in cluster.devices if device.island == island]
        target = self.draw.sample(ids, slice_.size)
        self.diary.append(f"remap {number} to {target}")
        # What it brings along may have failed with any island's hosts, and a failure of any slice's array tells.
        with self.crew.moving:
            self.crew.reach[number].add(island)
            everything = frozenset(range(SLICES))
            if (
                self.attempt(everything, frozenset([Call(True, True)]), lambda: (cluster.remap(slice_, target), 1))
                is not None
            ):
                self.crew.counts["remaps"] += 1

    # ---- values

    def value(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if dtype is np.float32 and np.prod(shape) > 1 << 16:
            dtype = np.int32
        generator = np.random.default_rng(self.draw.getrandbits(32))
        return np.asarray(generator.integers(0, MODULUS, shape), dtype)

    def hold(
        self,
        array: Any,
        want: np.ndarray,
        slices: frozenset[int],
        calls: frozenset[Call] = frozenset(),
        made_by: Call | None = None,
    ) -> Held | None:
        if array is None:
            return None
        held = Held(array, want, slices, calls, made_by)
        self.held.append(held)
        return held

    def drop(self, held: Held) -> None:
        self.held = [other for other in self.held if other is not held]

    def check(self, held: Held) -> None:
        """Reads and compares."""
        self.diary.append(f"read {held.want.shape} {held.want.dtype}")
        got = self.attempt(held.slices, held.calls, lambda: np.asarray(held.array))
        if got is None:
            self.drop(held)
            return
        self.crew.counts["reads"] += 1
        if got.dtype != held.want.dtype or got.shape != held.want.shape or not np.array_equal(got, held.want):
            raise Mismatch(f"{held.array!r} is {got!r}, expected {held.want!r}")

    def attempt(self, slices: frozenset[int], calls: frozenset[Call], action: Callable[[], Any]) -> Any:
        """The result; None when it failed for a good reason."""
        try:
            return action()
        except pw.errors.HostLostError as error:
            found = re.search(r"host (\d+) \(pid (\d+)\)", str(error))
            if found is None:
                raise Mismatch(f"names no host: {error}") from error
            host, pid = int(found[1]), int(found[2])
            self.crew.lost.add((host, pid))
            reach = self.crew.islands(slices)
            island = next(number for number, hosts in enumerate(self.crew.cluster.islands) if host in hosts)
            if island not in reach:
                raise Mismatch(f"came by islands {sorted(reach)} only, but failed with: {error}") from error
            self.crew.counts["HostLostError"] += 1
        except pw.errors.ResourceExhaustedError:
            self.crew.counts["ResourceExhaustedError"] += 1
            for held in self.held[::2]:
                self.drop(held)
        except pw.errors.DeadlineExceededError as error:
            if not any(call.timed for call in calls):
                raise Mismatch(f"nobody asked for a deadline: {error}") from error
            self.crew.counts["DeadlineExceededError"] += 1
        except pw.errors.CancelledError as error:
            if not any(call.cancelled for call in calls):
                raise Mismatch(f"nobody cancelled it: {error}") from error
            self.crew.counts["CancelledError"] += 1
        except pw.errors.ComputationError as error:
            # Known: what was submitted on top of a late or cancelled run that no host was granted fails by other words.
            if not any(call.timed or call.cancelled for call in calls) or "an argument is no buffer" not in str(error):
                raise
            self.crew.counts["on top of a dropped run"] += 1
        return None
