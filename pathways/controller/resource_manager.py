"""Which devices a slice gets: pure bookkeeping, no I/O, no threads, no clock. Owned by the controller.

The mesh of an island is the grid hosts x devices of each. A slice of n devices takes a rectangle of the grid, in
row-major order, so that neighbours in the slice are neighbours in the grid. Where no rectangle of n devices fits (5 on
2 x 4), the slice takes a run of consecutive devices. Any number of slices may share a device.

Where devices have links to their neighbours alone, and hosts say where they are, a slice takes a box of this torus in
which it keeps neighbours (TORUS-1), if the box is as little loaded as the rectangle or run: `pathways.plan.torus`.

The manager chooses in this order; each rule only breaks the ties of the rule before:
    1. island:    the lowest load per device, among the islands that are big enough;
    2. position:  the lowest total load of the devices that the slice would take;
    3. form:      a rectangle before a run; then one whose columns divide the slice's last axis or are divided by it, so
                  that the edge of a host does not break that axis; then the fewest hosts;
    4. corner:    aligned to the rectangle's own size, then the first.
A slice that gets another shape stays on its island, if that has enough devices. Devices of drained hosts are never
chosen, and refused where a client names them.

A client moves a slice's arrays after the manager has bound it to other devices. Until the client has said that all of
them are there (`settle`), the arrays lie on the old devices too, and the client may still take the move back (`undo`).

Invariants, checked by `validate()`:
    RM-1 (load)   the load of a device is the number of live slices bound to it.
    RM-2 (map)    a binding's devices are distinct, of one island, as many as its shape says.
    RM-3 (groups) one group per set of hosts, never renumbered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

import numpy as np

from pathways.errors import SliceError
from pathways.plan.topology import SliceBinding, Topology
from pathways.plan.torus import CLOSED, Tori

_WAIT = "`cluster.wait_for(devices=N)` waits until N devices are there"
_UNDRAIN = "`pathways undrain` lets slices lie there again"

_Load = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class ResourceManager:
    """Allocates slices on a `Topology`. Not thread-safe: only its owner may call it."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._load: list[_Load] = []
        self._row: dict[int, tuple[int, int]] = {}  # by host: its island, and its row in the island's mesh
        for island in range(len(topology.islands)):
            self._open(island)
        self._slices: dict[int, SliceBinding] = {}
        # Group 0 is all hosts.
        self._groups: dict[tuple[int, ...], int] = {tuple(range(topology.room)): 0}
        self._next_slice = 0
        self._missing: dict[int, str] = {}  # islands that take no new slices, and why
        self._drained: set[int] = set()  # hosts that take no slices
        self._origins: dict[int, SliceBinding] = {}  # of slices whose arrays may still lie there
        self.tori = Tori(topology)

    def grow(self, topology: Topology) -> None:
        """The cluster has one island more: see `Topology.opened`."""
        self._topology = topology
        self.tori.grow(topology)
        self._open(len(topology.islands) - 1)

    def _open(self, island: int) -> None:
        hosts = self._topology.islands[island]
        self._load.append(np.zeros((len(hosts), self._topology.count_of(hosts[0])), np.int64))
        self._row.update({host: (island, row) for row, host in enumerate(hosts)})

    # -- what may be used --------------------------------------------------------------------------------------------

    def set_missing(self, island: int, why: str | None) -> None:
        """An island takes no new slices, for this reason; None: it takes them."""
        self._missing.pop(island, None)
        if why is not None:
            self._missing[island] = why

    def set_drained(self, hosts: Iterable[int], drained: bool) -> None:
        """Hosts take no slices from now on, or take them again."""
        self._drained = self._drained | set(hosts) if drained else self._drained - set(hosts)

    @property
    def drained(self) -> frozenset[int]:
        """The hosts that take no slices."""
        return frozenset(self._drained)

    def slices_on(self, hosts: Iterable[int]) -> tuple[int, ...]:
        """The slices that have, or may still have, arrays on one of these hosts."""
        here = set(hosts)
        found = {number for number, binding in self._slices.items() if here & set(binding.hosts)}
        found |= {number for number, origin in self._origins.items() if here & set(origin.hosts)}
        return tuple(sorted(found))

    # -- slices ------------------------------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The cluster whose slices it allocates."""
        return self._topology

    @property
    def slices(self) -> tuple[SliceBinding, ...]:
        """Every live slice."""
        return tuple(self._slices.values())

    def allocate(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
        island: int | None = None,
        kind: str | None = None,
        devices: Sequence[int] = (),
    ) -> SliceBinding:
        """Binds a new slice.

        Args:
            shape: sizes of the slice's axes; `(n,)` for n devices.
            axis_names: one name per axis; `axis0`, `axis1`, ... when not given.
            island: the island to use; the least loaded one that is big enough when not given.
            kind: what the devices must be: a platform, or "gpu"; any when not given.
            devices: one per virtual device; the manager chooses them when there are none.

        Raises:
            SliceError: the request is invalid or fits on no island; the message names the request and the inventory.
        """
        sizes, names = self._checked(shape, axis_names)
        index, chosen = self._named("a slice", sizes, devices) if devices else self._choose(sizes, island, kind)
        binding = self._bind(self._next_slice, sizes, names, index, chosen)
        self._next_slice += 1
        return binding

    def release(self, slice_id: int) -> None:
        """Ends a slice, and removes its load at once."""
        self._add_load(self._get(slice_id).devices, -1)
        del self._slices[slice_id]
        self._origins.pop(slice_id, None)

    def remap(self, slice_id: int, devices: Sequence[int] = (), shape: Sequence[int] = ()) -> SliceBinding:
        """Binds a live slice to other devices, or gives it another shape; its id and names stay. `settle` or `undo`
        follows.

        Args:
            slice_id: the slice.
            devices: one per virtual device; the manager chooses them when there are none.
            shape: as many sizes as the slice has axes; the shape stays when there are none.

        Raises:
            SliceError: wrong number of devices, a repeated, unknown or drained one, devices of different islands or of
                one that is not there, or of another kind than now; or no island has room for the shape.
        """
        old = self._get(slice_id)
        sizes = self._checked(shape, old.axis_names)[0] if shape else old.shape
        if devices:
            island, new = self._named(f"slice {slice_id}", sizes, devices)
            if not self._is_like(island, old):
                theirs = self._topology.platform_of
                raise SliceError(
                    f"slice {slice_id} is of {theirs(old.island)} devices, but devices {list(new)} are "
                    f"{theirs(island)} devices: its programs do not run there"
                )
        else:
            places = self.places(slice_id, sizes)
            island, new = places[0] if places else self._choose(sizes, None, self._topology.platform_of(old.island))
        self._origins.setdefault(slice_id, old)
        self._add_load(old.devices, -1)
        return self._bind(slice_id, sizes, old.axis_names, island, new)

    def settle(self, slice_id: int) -> None:
        """All arrays of a slice lie where it is bound to."""
        self._get(slice_id)
        self._origins.pop(slice_id, None)

    def undo(self, slice_id: int) -> None:
        """A slice lies where it did before `remap`, also on drained hosts: its arrays have not left."""
        old, origin = self._get(slice_id), self._origins.pop(slice_id, None)
        if origin is not None:
            self._add_load(old.devices, -1)
            self._slices[slice_id] = origin
            self._add_load(origin.devices, 1)

    def places(
        self, slice_id: int, shape: Sequence[int] = (), without: Iterable[int] = ()
    ) -> list[tuple[int, tuple[int, ...]]]:
        """Where a slice could lie, in this shape or its own: the best devices of each island of its kind that has
        enough, not counting the hosts in `without`. Its own island comes first, then the less loaded ones.
        """
        old = self._get(slice_id)
        sizes = tuple(shape) or old.shape
        self._add_load(old.devices, -1)  # a slice is not in its own way
        try:
            islands = sorted(
                [each for each in range(len(self._load)) if each not in self._missing and self._is_like(each, old)],
                key=lambda index: (index != old.island, self._load_per_device(index), index),
            )
            count, closed = math.prod(sizes), frozenset(without)
            found = [(island, self._choose_place(island, sizes, count, closed)) for island in islands]
        finally:
            self._add_load(old.devices, 1)
        return [(island, devices) for island, devices in found if devices is not None]

    def _named(self, what: str, sizes: tuple[int, ...], devices: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """The island and the devices that a client has named for a slice."""
        count = math.prod(sizes)
        new = tuple(int(device) for device in devices)
        if len(new) != count or len(set(new)) != len(new):
            raise SliceError(f"{what} of shape {sizes} needs {count} distinct devices, got {list(new)}")
        if bad := [device for device in new if not self._topology.has_device(device)]:
            raise SliceError(f"no device {bad[0]}: the cluster has {self._topology.say_devices()}")
        homes = {self._topology.island_of(device // self._topology.devices_per_host) for device in new}
        if len(homes) != 1:
            raise SliceError(f"a slice lies on one island, but devices {list(new)} lie on islands {sorted(homes)}")
        if closed := self._drained & set(self._topology.hosts_of(new)):
            raise SliceError(f"devices {list(new)} lie on drained hosts {sorted(closed)}; {_UNDRAIN}")
        island = homes.pop()
        if island in self._missing:
            raise SliceError(f"devices {list(new)} are on island {island}, which {self._missing[island]}; {_WAIT}")
        return island, new

    def binding(self, slice_id: int) -> SliceBinding:
        """The current binding of a slice."""
        return self._get(slice_id)

    def group(self, hosts: Iterable[int]) -> int:
        """The number of the group of exactly these hosts. A new group gets the next free number (RM-3)."""
        key = tuple(sorted(set(hosts)))
        if key in self._groups:
            return self._groups[key]
        if not key or key[0] < 0 or key[-1] >= self._topology.hosts:
            raise SliceError(f"a group is of hosts 0..{self._topology.hosts - 1}, got {list(key)}")
        self._groups[key] = len(self._groups)
        return self._groups[key]

    @property
    def groups(self) -> dict[int, tuple[int, ...]]:
        """Every group so far, by number."""
        return {number: hosts for hosts, number in self._groups.items()}

    def device_load(self) -> tuple[int, ...]:
        """Number of slices on each device, by global number."""
        load = [0] * (self._topology.hosts * self._topology.devices_per_host)
        for index, grid in enumerate(self._load):
            for device, slices in zip(self._topology.island_devices(index), grid.flat, strict=True):
                load[device] = int(slices)
        return tuple(load)

    def validate(self) -> None:
        """Asserts RM-1, RM-2 and RM-3."""
        expected = [0] * len(self.device_load())
        for binding in self._slices.values():
            assert len(set(binding.devices)) == len(binding.devices) == math.prod(binding.shape), "RM-2"
            assert set(binding.devices) <= set(self._topology.island_devices(binding.island)), "RM-2"
            assert binding.hosts == self._topology.hosts_of(binding.devices), "RM-2"
            assert self._groups[binding.hosts] == binding.group, "RM-3"
            for device in binding.devices:
                expected[device] += 1
        assert tuple(expected) == self.device_load(), "RM-1"
        assert sorted(self._groups.values()) == list(range(len(self._groups))), "RM-3"
        assert set(self._origins) <= set(self._slices)

    # -- choosing ------------------------------------------------------------------------------------------------

    def _checked(
        self, shape: Sequence[int], axis_names: Sequence[str] | None
    ) -> tuple[tuple[int, ...], tuple[str, ...]]:
        try:
            sizes = tuple(int(size) for size in shape)
            whole = all(size == given and not isinstance(given, bool) for size, given in zip(sizes, shape, strict=True))
        except (TypeError, ValueError) as error:
            raise SliceError(f"a slice's shape is a tuple of positive ints, got {shape!r}") from error
        if not sizes:
            raise SliceError("a slice's shape has at least one axis, got the empty shape (); ask for (1,)")
        if not whole or any(size < 1 for size in sizes):
            raise SliceError(f"a slice's shape is a tuple of positive ints, got {tuple(shape)}")
        names = tuple(f"axis{i}" for i in range(len(sizes))) if axis_names is None else tuple(axis_names)
        if len(names) != len(sizes):
            raise SliceError(f"shape {sizes} has {len(sizes)} axes, but {len(names)} axis names came: {names}")
        if len(set(names)) != len(names):
            raise SliceError(f"the axis names of a slice differ from each other, got {names}")
        return sizes, names

    def _is_like(self, island: int, binding: SliceBinding) -> bool:
        """Whether an island has the same kind of devices as that of a slice."""
        return self._topology.platform_of(island) == self._topology.platform_of(binding.island)

    def _choose(
        self, sizes: tuple[int, ...], island: int | None, kind: str | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """An island, and devices there."""
        count = math.prod(sizes)
        asked = (
            f"a slice of shape {sizes} ({count} devices) was asked for"
            if len(sizes) > 1
            else f"a slice of {count} devices was asked for"
        )
        if not self._load:
            raise SliceError(f"{asked}, but the cluster has {self._topology.say_islands()}; {_WAIT}")
        there = [each for each in range(len(self._load)) if self._topology.is_of_kind(each, kind)]
        if kind is not None and not there:
            kinds = ", ".join(self._topology.kinds())
            raise SliceError(f"a slice of {kind!r} devices was asked for, but the cluster has: {kinds}")
        if island is not None:
            if isinstance(island, bool) or not isinstance(island, int) or not 0 <= island < len(self._load):
                raise SliceError(f"{asked} on island {island!r}, but the cluster has {self._topology.say_islands()}")
            if island not in there:
                theirs = self._topology.platform_of(island)
                raise SliceError(f"{asked} of {kind!r} devices, but those of island {island} are {theirs}")
            if count > self._load[island].size:
                raise SliceError(
                    f"{asked} on island {island}, which has {self._load[island].size} devices ({self._inventory()})"
                )
            if island in self._missing:
                raise SliceError(f"{asked} on island {island}, which {self._missing[island]}; {_WAIT}")
            return island, self._choose_place(island, sizes, count) or self._refuse(asked, [island])
        fitting = [index for index in there if self._load[index].size >= count]
        if not fitting:
            biggest = max((self._load[index].size for index in there), default=0)
            raise SliceError(
                f"{asked}, but a slice lies on one island and the biggest has {biggest} devices ({self._inventory()})"
            )
        there = [index for index in fitting if index not in self._missing]
        if not there:
            raise SliceError(f"{asked}, but island {fitting[0]} {self._missing[fitting[0]]}; {_WAIT}")
        for index in sorted(there, key=lambda index: (self._load_per_device(index), index)):
            if (devices := self._choose_place(index, sizes, count)) is not None:
                return index, devices
        self._refuse(asked, there)

    def _refuse(self, asked: str, islands: Sequence[int]) -> NoReturn:
        closed = sorted(host for host in self._drained if self._row[host][0] in islands)
        raise SliceError(f"{asked}, but hosts {closed} are drained, and without them there is no room; {_UNDRAIN}")

    def _load_per_device(self, island: int) -> float:
        """Of the devices that may be used."""
        rows = [row for row, host in enumerate(self._topology.islands[island]) if host not in self._drained]
        return float(self._load[island][rows].mean()) if rows else math.inf

    def _choose_place(
        self, island: int, sizes: tuple[int, ...], count: int, without: frozenset[int] = frozenset()
    ) -> tuple[int, ...] | None:
        """Devices of an island; None: it has not so many, or not without drained hosts and those in `without`."""
        if count > self._load[island].size:
            return None
        load = self._load[island].copy()
        for row, host in enumerate(self._topology.islands[island]):
            if host in self._drained or host in without:
                load[row] += CLOSED  # so that a slice is never put there
        hosts, width = load.shape
        # sums[i, j] is the load of the rectangle above and left of (i, j). The load of any rectangle is then a sum of
        # four of these.
        sums = np.zeros((hosts + 1, width + 1), np.int64)
        sums[1:, 1:] = load.cumsum(0).cumsum(1)
        best: tuple[tuple[int, ...], list[int]] | None = None
        for rows in range(1, min(hosts, count) + 1):
            columns = count // rows
            if rows * columns != count or columns > width:
                continue
            under = sums[rows:, columns:] - sums[:-rows, columns:] - sums[rows:, :-columns] + sums[:-rows, :-columns]
            broken = int(columns % sizes[-1] != 0 and sizes[-1] % columns != 0)
            for top, left in np.argwhere(under == np.min(under)).tolist():
                crooked = int(top % rows != 0) + int(left % columns != 0)
                key = (int(under[top, left]), 0, broken, rows, crooked, top, left)
                if best is None or key < best[0]:
                    cells = [(top + i) * width + left + j for i in range(rows) for j in range(columns)]
                    best = key, cells
                if crooked == 0:
                    break  # row-major order: no later corner of this form is better
        sums_flat = np.concatenate(([0], load.ravel().cumsum()))
        runs = sums_flat[count:] - sums_flat[:-count]
        start = int(np.argmin(runs))
        if best is None or (int(runs[start]), 1) < best[0][:2]:
            best = (int(runs[start]), 1), list(range(start, start + count))
        total, chosen = best[0][0], tuple(best[1])
        if (torus := self.tori.of(island)) is not None:
            box = torus.place(sizes, load.ravel().tolist())
            if box is not None and box[0] <= total:
                total, chosen = box
        if total >= CLOSED:
            return None
        numbers = self._topology.island_devices(island)
        return tuple(numbers[cell] for cell in chosen)

    def _inventory(self) -> str:
        return "the cluster has " + self._topology.describe()

    # -- bookkeeping ---------------------------------------------------------------------------------------------

    def _bind(
        self, slice_id: int, sizes: tuple[int, ...], names: tuple[str, ...], island: int, devices: tuple[int, ...]
    ) -> SliceBinding:
        hosts = self._topology.hosts_of(devices)
        binding = SliceBinding(slice_id, sizes, names, island, devices, hosts, self.group(hosts))
        self._add_load(devices, 1)
        self._slices[slice_id] = binding
        return binding

    def _add_load(self, devices: tuple[int, ...], change: int) -> None:
        for device in devices:
            host, local = divmod(device, self._topology.devices_per_host)
            island, row = self._row[host]
            self._load[island][row, local] += change

    def _get(self, slice_id: int) -> SliceBinding:
        try:
            return self._slices[slice_id]
        except KeyError:
            raise SliceError(f"no slice {slice_id}; live slices: {sorted(self._slices) or 'none'}") from None
