"""The machine of tests/triton/gluon_emulator.py: partitions of warps, barriers, shared memory, copies and products."""

from __future__ import annotations

import itertools
import math
import random
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


class Fault(Exception):
    """An error in the kernel that would give wrong results or hang on a GPU, in this order or another."""


class Deadlock(Fault):
    """A state in which no partition can go on, and no copy is under way."""


class _Stop(BaseException):
    """Ends a partition's thread after a fault in another partition."""


machine: Machine


def begin(drawn: random.Random) -> Machine:
    """Make and return the machine of one program, which is the current one from here on."""
    global machine
    machine = Machine(drawn)
    return machine


# ---- simultaneous events


class Actor:
    """Something that takes a step whenever `Machine` chooses it. The slowest actors are a thousand times slower."""

    def __init__(self) -> None:
        self.speed = 10 ** machine.random.uniform(-1.5, 1.5)

    def step(self) -> None:
        raise NotImplementedError


class Partition(Actor):
    """A partition of warps, as a thread that runs between two calls of `Machine.turn`.

    known: the numbers of the accesses that have ended for this partition. products: the products not waited for yet.
    """

    def __init__(self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], known: set[int]) -> None:
        super().__init__()
        self.name, self.known = name, set(known)
        self.products: deque[UnfinishedProduct] = deque()
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for: tuple[Any, ...] = ()
        self.done, self.result = False, None
        self.problem: Exception | None = None
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, args=(function, arguments), name=name, daemon=True)
        self.thread.start()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.go.acquire()
        try:
            with np.errstate(all="ignore"):
                if not machine.stopped:
                    self.result = function(*arguments)
        except _Stop:
            pass
        except Exception as problem:
            problem.add_note(f"in partition {self.name}")
            self.problem = problem
        self.done = True
        machine.back.release()

    def step(self) -> None:
        machine.running = self
        self.go.release()
        machine.back.acquire()
        if self.problem is not None:
            raise self.problem


class Machine:
    """One program: its partitions, its copies under way, and its barriers.

    unfinished: descriptions of copies and products by number.
    """

    running: Partition

    def __init__(self, numbers: random.Random) -> None:
        self.random = numbers
        self.partitions: list[Partition] = []
        self.copies: list[Copy] = []
        self.barriers: dict[int, Barrier] = {}
        self.unfinished: dict[int, str] = {}
        self.accesses, self.allocations = itertools.count(), itertools.count()
        self.back, self.stopped = threading.Semaphore(0), False

    def run(self, kernel: Any, arguments: tuple[Any, ...]) -> None:
        main = Partition(kernel.__name__, kernel, arguments, set())
        self.partitions.append(main)
        try:
            while not all(partition.done for partition in self.partitions):
                actors = self.actors()
                if not actors:
                    stuck = [partition for partition in self.partitions if not partition.done]
                    raise Deadlock("; ".join(f"{p.name} waits for {' '.join(map(str, p.waits_for))}" for p in stuck))
                self.random.choices(actors, [actor.speed for actor in actors])[0].step()
        finally:
            self.stopped = True
            for partition in self.partitions:
                partition.go.release()
                partition.thread.join()
        for access, what in self.unfinished.items():
            if access not in main.known:
                raise Fault(f"nothing waits for the {what} before the program ends")

    def actors(self) -> list[Actor]:
        """The actors that can take a step. A partition's products are computed in the order of their issue."""
        found: list[Actor] = [*self.copies]
        for partition in self.partitions:
            if not partition.done and partition.ready():
                found.append(partition)
            found.extend(itertools.islice((p for p in partition.products if p.value is None), 1))
        return found

    def turn(self, ready: Callable[[], bool] = lambda: True, *waits_for: Any) -> Partition:
        """Let other actors go on, and return once the caller is `ready` and chosen."""
        me = self.running
        me.ready, me.waits_for = ready, waits_for
        self.back.release()
        me.go.acquire()
        if self.stopped:
            raise _Stop
        return me


def warp_specialize(parts: Any, worker_num_warps: Any, worker_num_regs: Any) -> Any:
    if not len(parts) - 1 == len(worker_num_warps) == len(worker_num_regs):
        raise Fault(f"{len(parts)} partitions, but warps for {len(worker_num_warps)} workers beside the first")
    me = machine.turn()
    started = [
        Partition(f"{n} ({function.__name__})", function, tuple(given), me.known)
        for n, (function, given) in enumerate(parts)
    ]
    machine.partitions += started
    machine.turn(lambda: all(partition.done for partition in started), "its partitions")
    me.known.update(*(partition.known for partition in started))
    return started[0].result


# ---- shared memory


class Shared:
    """Shared memory, or a part of it.

    log: the accesses to the whole allocation that can still conflict: part, number, whether it writes, description.
    """

    def __init__(self, data: np.ndarray, dtype: Any, layout: Any, name: str, log: list[Any]) -> None:
        self.data, self.dtype, self.layout, self.name, self.log = data, dtype, layout, name, log
        self.shape = list(data.shape)
        self.type = types.SimpleNamespace(element_ty=dtype, shape=self.shape, layout=layout)

    def part(self, data: np.ndarray, name: str) -> Shared:
        return Shared(data, self.dtype, self.layout, name, self.log)

    def index(self, index: Any) -> Shared:
        at = number(index)
        if not 0 <= at < len(self.data):
            raise Fault(f"{self.name} has no index {at}: its shape is {self.shape}")
        return self.part(self.data[at], f"{self.name}[{at}]")

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        first, last, dim = number(start), number(start) + number(length), number(dim)
        if not 0 <= first <= last <= self.shape[dim]:
            raise Fault(f"{self.name} has no [{first}:{last}] in dimension {dim}: its shape is {self.shape}")
        return self.part(self.data[(slice(None),) * dim + (slice(first, last),)], f"{self.name}[{first}:{last}]")

    def permute(self, order: Any) -> Shared:
        return self.part(self.data.transpose([number(n) for n in order]), self.name)

    def reshape(self, shape: Any) -> Shared:
        data = self.data.reshape([number(n) for n in shape])
        if not np.shares_memory(data, self.data):
            raise Fault(f"{self.name} cannot be reshaped to {shape} in place")
        return self.part(data, self.name)

    def load(self, layout: Any) -> Any:
        me = machine.turn()
        me.known.add(self.access(me, "load", writes=False))
        return tensor(self.data.copy(), self.dtype)

    def store(self, value: Any) -> None:
        me = machine.turn()
        if value.dtype != self.dtype or list(value.shape) != self.shape:
            raise Fault(f"{self.name}, {self.dtype} {self.shape}, cannot hold {value.dtype} {list(value.shape)}")
        me.known.add(self.access(me, "store", writes=True))
        self.data[...] = value.handle.data

    def access(self, me: Partition, what: str, *, writes: bool) -> int:
        """The number of an access by `me`. Raises Fault if the access conflicts with one unknown to `me`."""
        for data, before, wrote, earlier in self.log:
            if (writes or wrote) and before not in me.known and np.shares_memory(data, self.data):
                raise Fault(f"{what} in {me.name}: {self.name} has a {earlier} that it has not waited for")
        mine, what = next(machine.accesses), f"{what} in {me.name}"
        if writes:
            self.log[:] = [x for x in self.log if not same_memory(x[0], self.data)]
        self.log.append((self.data, mine, writes, what))
        return mine

    def spoil(self) -> None:
        """Fill with NaN, or with -1 if the dtype is an integer."""
        self.data[...] = np.frombuffer(b"\xff" * self.data.itemsize, self.data.dtype)[0]


def same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    return a.ctypes.data == b.ctypes.data and a.size == b.size and a.flags.forc and b.flags.forc


def allocate_shared_memory(element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
    data = np.empty([number(n) for n in shape], interpreter._get_np_dtype(element_ty))
    memory = Shared(data, element_ty, layout, f"allocation {next(machine.allocations)}", [])
    memory.spoil()
    if value is not None:
        memory.store(value)
    return memory


# ---- barriers


class Barrier:
    """An mbarrier.

    gathered: the accesses known to the partitions that arrived in this phase. released: the same for all phases before.
    """

    def __init__(self, memory: Shared, count: int) -> None:
        self.memory, self.count = memory, count
        self.phase, self.arrivals, self.bytes = 0, count, 0
        self.gathered: set[int] = set()
        self.released: set[int] = set()

    def __str__(self) -> str:
        return (
            f"{self.memory.name} (in phase {self.phase}, to which {self.arrivals} of {self.count} arrivals and "
            f"{self.bytes} bytes are still to come)"
        )

    def change(self, known: set[int], arrivals: int = 0, bytes: int = 0) -> None:
        if arrivals > self.arrivals:
            raise Fault(f"{arrivals} more arrivals at {self}")
        self.gathered |= known
        self.arrivals -= arrivals
        self.bytes += bytes
        if self.arrivals == self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, self.count
            self.released |= self.gathered
            self.gathered = set()


def address(mbarrier: Shared) -> int:
    return mbarrier.data.ctypes.data


def barrier_at(mbarrier: Shared) -> Barrier:
    if address(mbarrier) not in machine.barriers:
        raise Fault(f"{mbarrier.name} is no barrier yet")
    return machine.barriers[address(mbarrier)]


def init(mbarrier: Shared, count: Any) -> None:
    machine.turn()
    if address(mbarrier) in machine.barriers:
        raise Fault(f"{mbarrier.name} is a barrier already")
    machine.barriers[address(mbarrier)] = Barrier(mbarrier, number(count))


def invalidate(mbarrier: Shared) -> None:
    machine.turn()
    barrier_at(mbarrier)
    del machine.barriers[address(mbarrier)]


def expect(mbarrier: Shared, bytes: Any, pred: Any = True) -> None:
    """Expect `bytes`, and arrive once, as on the GPU."""
    me = machine.turn()
    if pred:
        barrier_at(mbarrier).change(me.known, arrivals=1, bytes=number(bytes))


def arrive(mbarrier: Shared, *, count: Any = 1, pred: Any = True) -> None:
    me = machine.turn()
    if pred:
        barrier_at(mbarrier).change(me.known, arrivals=number(count))


def wait(mbarrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        barrier, parity = barrier_at(mbarrier), number(phase)
        if parity not in (0, 1):
            raise Fault(f"a wait for parity {parity} of {barrier}")
        me = machine.turn(lambda: barrier.phase & 1 != parity, f"parity {parity} of", barrier)
        me.known |= barrier.released


# ---- copies


class Descriptor:
    """A TensorDescriptor within a kernel."""

    def __init__(self, host: Any) -> None:
        self.tensor = torch.as_strided(host.base, host.shape, host.strides)
        self.dtype = interpreter._implicit_cvt(host.base).dtype.element_ty
        self.block_type = tl.block_type(self.dtype, list(host.block_shape))
        self.block_shape, self.layout = list(host.block_shape), host.layout
        self.shape, self.strides = (interpreter._implicit_cvt(tuple(sizes)) for sizes in (host.shape, host.strides))
        self.outside = float("nan") if host.padding == "nan" else 0

    def block(self, at: list[int]) -> np.ndarray:
        block = torch.full(self.block_shape, self.outside, dtype=self.tensor.dtype)
        bounds = list(zip(at, self.block_shape, self.tensor.shape, strict=True))
        source = tuple(slice(max(first, 0), max(min(first + size, end), 0)) for first, size, end in bounds)
        target = tuple(slice(part.start - first, part.stop - first) for first, part in zip(at, source, strict=True))
        if all(part.start < part.stop for part in source):
            block[target] = self.tensor[source]
        return block.view(torch.int16).numpy().view(np.uint16) if block.dtype == torch.bfloat16 else block.numpy()


class Copy(Actor):
    """A copy from global to shared memory."""

    def __init__(self, source: Descriptor, at: list[int], barrier: Barrier, target: Shared, known: set[int]) -> None:
        super().__init__()
        self.source, self.at, self.barrier, self.target, self.known = source, at, barrier, target, known

    def step(self) -> None:
        machine.copies.remove(self)
        self.target.data[...] = self.source.block(self.at).reshape(self.target.shape)
        self.barrier.change(self.known, bytes=-self.source.block_type.nbytes)


def async_copy_global_to_shared(
    tensor_desc: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True
) -> None:
    me = machine.turn()
    if not pred:
        return
    # Triton drops leading dimensions of size 1.
    fits = result.shape == tensor_desc.block_shape[-len(result.shape) :] and result.dtype == tensor_desc.dtype
    if not fits or result.data.size != math.prod(tensor_desc.block_shape) or len(coord) != len(tensor_desc.shape):
        raise Fault(
            f"a copy of {tensor_desc.dtype} {tensor_desc.block_shape} at {len(coord)} coordinates into {result.name}, "
            f"{result.dtype} {result.shape}"
        )
    mine = result.access(me, "copy", writes=True)
    machine.unfinished[mine] = f"copy into {result.name}"
    result.spoil()
    at = [number(n) for n in coord]
    machine.copies.append(Copy(tensor_desc, at, barrier_at(barrier), result, {*me.known, mine}))


# ---- products


class UnfinishedProduct(Actor):
    """A product issued by a warpgroup. It is not a tensor; only a wait returns one.

    accesses: to the operands in shared memory.
    """

    def __init__(self, a: Any, b: Shared, acc: Any, accesses: list[int]) -> None:
        super().__init__()
        self.a, self.b, self.acc, self.accesses = a, b, acc, accesses
        self.shape = [a.shape[0], b.shape[1]]
        self.value: Any = None
        self.waited = False

    def step(self) -> None:
        # Rounded once, because numpy's own rounding of sums depends on the shape.
        value = np.matmul(operand(self.a), operand(self.b))
        if self.acc is not None:
            acc = self.acc.value if isinstance(self.acc, UnfinishedProduct) else self.acc
            value = value + acc.handle.data
        self.value = tensor(value.astype(np.float32), tl.float32)


def operand(x: Any) -> np.ndarray:
    """The numbers of an operand, which is a tensor or shared memory."""
    return floats(x.data if isinstance(x, Shared) else x.handle.data, x.dtype)


def floats(data: np.ndarray, dtype: Any) -> np.ndarray:
    """`data` of the interpreter, which stores bfloat16 in integers, as float64."""
    if dtype == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


def warpgroup_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, precision: Any = None, max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:  # fmt: skip
    me = machine.turn()
    product = f"product of {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    (rows, inner), (depth, columns) = a.shape, b.shape
    if not isinstance(b, Shared) or a.dtype != b.dtype or inner != depth or list(acc.shape) != [rows, columns]:
        raise Fault(f"a {product} with an accumulator {list(acc.shape)}")
    operands = [x for x in (a, b) if isinstance(x, Shared)]
    issued = UnfinishedProduct(
        a, b, acc if use_acc else None, [x.access(me, "product", writes=False) for x in operands]
    )
    machine.unfinished |= dict.fromkeys(issued.accesses, product)
    me.products.append(issued)
    return issued if is_async else warpgroup_mma_wait(0, (issued,))


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    me = machine.turn()
    if deps is None:
        raise ValueError("warpgroup_mma_wait deps must be given")
    while len(me.products) > number(num_outstanding):
        product = me.products.popleft()
        if product.value is None:
            product.step()
        product.waited = True
        me.known |= set(product.accesses)
    given = tuple(x.value if isinstance(x, UnfinishedProduct) and x.waited else x for x in deps)
    return given[0] if len(given) == 1 else given


def number(x: Any) -> int:
    return x.handle.data.item() if isinstance(x, tl.tensor) else int(x)


def tensor(data: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
