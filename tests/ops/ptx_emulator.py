"""The PTX of a compiled kernel on a CPU: all threads of one program in lockstep, by numpy.

    program = Program(ptx, "_held_kernel", num_threads=128)
    program.run([0, 4096, 1.5], words)  # two addresses in bytes and a float; words of 32 bits

For kernels whose branches are the same in all threads. Unknown instructions and branches that
threads take differently raise an error. So does a race: a word that a warp stores and another one
loads or stores, with no barrier between. What nothing has written is NaN.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
TYPES: dict[str, Any] = {
    "pred": np.bool_, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
OPERATIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": np.left_shift, "shr": np.right_shift, "min": np.fmin, "max": np.fmax, "abs": np.abs,
    "ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal, "mov": np.copy, "ld": np.copy,
    "mad": lambda x, y, z: x * y + z,
    "fma": lambda x, y, z: x.astype(np.float64) * y + z,
    "bfe": lambda x, first, count: x >> first & ((np.uint32(1) << count) - np.uint32(1)),
    "selp": lambda x, y, is_first: np.where(is_first, x, y),
}  # fmt: skip
COMPARISONS: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": lambda x, y: (x < y) | (x > y),
    # true for NaN
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y), "neu": np.not_equal,
    "gtu": lambda x, y: ~(x <= y), "geu": lambda x, y: ~(x < y),
}  # fmt: skip
NAMES = {*OPERATIONS, "st", "bar", "bra", "ret", "setp", "cvt", "shfl"}
MODIFIERS = {
    "warp",
    "rn",
    "rzi",
    "ftz",
    "approx",
    "full",
    "lo",
    "wide",
    "uni",
    "sync",
    "bfly",
    "v2",
    "v4",
}
MODIFIERS |= {"global", "shared", "param", *TYPES, *COMPARISONS}
TOKEN = re.compile(r"\s*(?:([$\w]+):|([{}])|\.loc.*|([^;]+);)")  # label, scope, line, statement
STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?(\w+)([.\w:]*)\s*(.*)", re.DOTALL)
OPERAND = re.compile(r"{[^}]*}|\[[^]]*]|[^,\s]+")
NAME = re.compile(r"[^{},\s]+")  # of a register in a list
DYNAMIC = 2**17  # address of the shared memory that a launch allocates, in bytes


class Memory:
    """Words, and the least and greatest warp that has loaded and stored each since a barrier."""

    def __init__(self, words: Array) -> None:
        self.words = words
        self.low, self.high = np.empty((2, 2, len(words)), np.int8)
        self.synchronize()

    def synchronize(self) -> None:
        self.low.fill(127)
        self.high.fill(-1)

    def note(self, at: Array, warps: Array, is_store: int) -> None:
        np.minimum.at(self.low[is_store], at, warps)
        np.maximum.at(self.high[is_store], at, warps)
        for other in (0, 1) if is_store else (1,):
            is_alone = (self.low[other, at] >= warps) & (self.high[other, at] <= warps)
            assert is_alone.all(), "warps race for a word"


class Program:
    """A kernel whose programs have ``num_threads`` threads."""

    def __init__(self, ptx: str, kernel: str, num_threads: int) -> None:
        self.kernel, self.threads = kernel, np.arange(num_threads, dtype=np.uint32)
        self.code: list[tuple[Any, ...]] = []  # statement, its guard, name, modifiers, operands
        self.labels: dict[str, int] = {}
        text = re.sub(r"//.*|::cta", "", ptx[ptx.index(f".entry {kernel}(") :])
        place, depth, size, symbols = text.index("\n{") + 2, 1, 0, {"global_smem": DYNAMIC}
        while depth:
            token = TOKEN.match(text, place)
            assert token is not None
            place = token.end()
            label, scope, statement = token.groups(default="")
            depth += (scope == "{") - (scope == "}")
            if label:
                self.labels[label] = len(self.code)
            elif shared := re.match(r"\.shared .*\.b32 (\w+)\[(\d+)]", statement):
                symbols[shared[1]], size = size, size + 4 * int(shared[2])
            elif statement and not statement.startswith((".reg", ".pragma")):
                for symbol, address in symbols.items():
                    statement = re.sub(rf"\b{symbol}\b", str(address), statement)
                [(negation, guard, name, modifiers, rest)] = STATEMENT.findall(statement)
                modifiers = modifiers.split(".")[1:]
                if name not in NAMES or not MODIFIERS.issuperset(modifiers):
                    raise NotImplementedError(statement)
                guard = (guard or "1", bool(negation))
                self.code.append((statement, guard, name, modifiers, OPERAND.findall(rest)))

    def run(self, params: Sequence[float], words: Array, number: int = 0) -> None:
        """Run the program of this number in its grid on the global memory ``words``."""
        bits = [np.float32(p).view(np.uint32) if isinstance(p, float) else p for p in params]
        self.params = {f"[{self.kernel}_param_{k}]": str(value) for k, value in enumerate(bits)}
        shared = np.full(2 * DYNAMIC // 4, 2**32 - 1, np.uint32)
        self.memories = {"global": Memory(words), "shared": Memory(shared)}
        ids = {"%tid.x": self.threads, "%ctaid.x": np.full_like(self.threads, number)}
        self.registers: dict[str, Array] = ids
        place = 0
        with np.errstate(all="ignore"):
            while self.code[place][2] != "ret":
                try:
                    place = self.step(place)
                except Exception as error:
                    error.add_note(self.code[place][0])
                    raise

    def step(self, place: int) -> int:
        """Execute an instruction; return the place of the next one."""
        _, (guard, is_negated), name, modifiers, operands = self.code[place]
        active = self.value(guard, "pred") ^ is_negated
        if name == "bra":
            assert active.all() or not active.any(), "threads take different branches"
            return self.labels[operands[0]] if active.all() else place + 1
        if modifiers[:1] == ["warp"]:
            pass  # the threads of a warp are in lockstep here
        elif name == "bar":
            for memory in self.memories.values():
                memory.synchronize()
        elif modifiers[0] in self.memories:
            self.move(name == "st", modifiers[0], operands, active)
        else:
            self.set(operands[0], self.result(name, modifiers, operands[1:]), active)
        return place + 1

    def value(self, operand: str, kind: str) -> Array:
        """A register, a pair of them or a constant as numbers of a type."""
        found, dtype = self.registers.get(operand), np.dtype(TYPES[kind])
        if operand.startswith("{"):
            return np.ravel(self.words(operand).view(dtype))
        if found is None:
            found = constant(self.params.get(operand, operand), dtype, len(self.threads))
        assert found.dtype.itemsize == dtype.itemsize, f"{operand} is {found.dtype}"
        return found.view(dtype)

    def words(self, registers: str) -> Array:
        return np.stack([self.value(name, "u32") for name in NAME.findall(registers)], axis=1)

    def set(self, registers: str, value: Array, active: Array) -> None:
        names = NAME.findall(registers)
        if len(names) > 1:
            value = value.view(np.uint32)
        for name, column in zip(names, value.reshape(len(active), -1).T, strict=True):
            old = self.registers.get(name, constant("-1", column.dtype, len(active)))
            self.registers[name] = np.where(active, column, old.view(column.dtype))

    def move(self, is_store: bool, space: str, operands: list[str], active: Array) -> None:
        """Load or store one to four words per thread."""
        address, registers = operands if is_store else operands[::-1]
        base, *offset = re.findall(r"[^[\]+\s]+", address)
        first = self.value(base, "u64" if space == "global" else "u32").astype(np.int64)
        at = (first + sum(map(int, offset)))[active, None] + 4 * np.arange(registers.count(",") + 1)
        assert (at >= 0).all()
        assert not (at[:, 0] % (4 * at.shape[1])).any(), "the address is not aligned"
        memory, warps = self.memories[space], self.threads[active, None] // 32
        memory.note(at // 4, warps.astype(np.int8), int(is_store))
        if is_store:
            memory.words[at // 4] = self.words(registers)[active]
        else:
            loaded = np.zeros((len(active), at.shape[1]), np.uint32)
            loaded[active] = memory.words[at // 4]
            self.set(registers, loaded, active)

    def result(self, name: str, modifiers: list[str], sources: list[str]) -> Array:
        """The value that an instruction computes."""
        kind = modifiers[-1]
        x = self.value(sources[0], kind)
        if name == "setp":
            return np.asarray(COMPARISONS[modifiers[0]](x, self.value(sources[1], kind)))
        if name == "shfl":
            assert sources[2] == "31"  # all lanes of a warp
            return np.take(x, self.threads ^ int(sources[1]))
        if name == "cvt":
            if "rzi" in modifiers:
                x = np.nan_to_num(x.astype(np.float64)).clip(-(2**31), 2**31 - 1)
            return x.astype(TYPES[modifiers[-2]])
        wide = {"u32": "u64", "s32": "s64"}[kind] if "wide" in modifiers else kind
        last = {"shl": "u32", "shr": "u32", "selp": "pred", "mad": wide}.get(name, kind)
        kinds = [kind] * (len(sources) - 1) + [last]
        values = [self.value(*each) for each in zip(sources, kinds, strict=True)]
        if name != "selp":
            values = [value.astype(TYPES[wide]) for value in values]
        if "ftz" not in modifiers:
            return np.asarray(OPERATIONS[name](*values), TYPES[wide])
        return flushed(OPERATIONS[name](*map(flushed, values)).astype(TYPES[wide]))


@functools.cache
def constant(text: str, dtype: np.dtype[Any], size: int) -> Array:
    bits = int(text[2:], 16) if text.startswith("0f") else int(text)
    if dtype.itemsize == 1:
        return np.full(size, bits != 0)
    return np.full(size, bits % 256**dtype.itemsize, f"u{dtype.itemsize}").view(dtype)


def flushed(x: Array) -> Array:
    """Zero in place of subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
