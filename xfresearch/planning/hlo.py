"""Parses a compiled program's text (optimized HLO) into computations and instructions, and counts how often each runs.

The compiler's own cost analysis counts the body of a loop once. Here a body counts once per iteration. The trip count
is the loop's `known_trip_count` (CPU and GPU), or follows from the loop's counter: its start, its step, and the
constant that the condition compares it with (TPU).
"""

import math
import re
from dataclasses import dataclass, field

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0, "opaque": 0}
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^{}]*\})?")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'known_trip_count[\\"]*:\s*\{[\\"]*n[\\"]*:[\\"]*(\d+)')
LOOP = ("condition", "body")
INTEGER = re.compile(r" constant\((-?\d+)\)")
ELEMENT = re.compile(r", index=(\d+)")
ASYNCHRONOUS = {"async-start", "call-start"}  # call-start: for other cores of a TPU
CALLS = {"call", "conditional"} | ASYNCHRONOUS
OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    fast: bool  # in on-chip memory, not in HBM

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        width = BYTES.get(self.dtype)
        if width is None:
            width = int(match_of(r"\d+", self.dtype)[0]) / 8
        return self.size * width


@dataclass
class Instruction:
    name: str
    opcode: str
    outputs: list[Array]  # one, or the elements of a tuple
    operands: list[str]
    text: str  # the whole line
    root: bool

    @property
    def called(self) -> list[str]:
        found = CALLED.findall(self.text)
        for branches in BRANCHES.findall(self.text):
            found += NAME.findall(branches)
        return found

    @property
    def op_name(self) -> str:
        found = OP_NAME.search(self.text)
        return found[1] if found else ""


@dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)

    def operand(self, instruction: Instruction, index: int) -> Array:
        """The array that an instruction reads as its operand of this index; of a tuple the first one."""
        return self.instructions[instruction.operands[index]].outputs[0]

    def first_arrays(self, instruction: Instruction) -> list[Array]:
        """The operands of an instruction, of a tuple its first array, without those of other computations."""
        return [each.outputs[0] for each in self._operands(instruction) if each.outputs]

    def read_by(self, instruction: Instruction) -> list[Array]:
        """All arrays of the operands of an instruction."""
        return [array for each in self._operands(instruction) for array in each.outputs]

    def _operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def parameters(self) -> list[Instruction]:
        """The parameters in the order of the call's operands."""
        inputs = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(inputs, key=lambda i: int(match_of(r" parameter\((\d+)\)", i.text)[1]))


@dataclass
class Program:
    computations: dict[str, Computation]
    entry: str

    def runs(self) -> dict[str, float]:
        """How often each computation runs in one step; computations of fusions are left out."""
        counts: dict = {}

        def visit(name: str, times: float) -> None:
            counts[name] = counts.get(name, 0) + times
            for instruction in self.computations[name].instructions.values():
                if instruction.opcode == "while":
                    trips = self.trip_count(self.computations[name], instruction)
                    for inner in instruction.called:
                        visit(inner, times * (1 if trips is None else trips))
                elif instruction.opcode in CALLS:
                    for inner in instruction.called:
                        visit(inner, times)

        visit(self.entry, 1)
        return counts

    def trip_count(self, computation: Computation, loop: Instruction) -> int | None:
        """How often the body of a computation's loop runs; None if the count is unreadable or depends on the data.

        The step need not be 1: if a TPU splits a product into pieces passed around a ring, each iteration computes two.
        """
        stated = TRIPS.search(loop.text)
        if stated:
            return int(stated[1])
        condition, body = (self.computations[match_of(rf"{name}=%?([\w.\-]+)", loop.text)[1]] for name in LOOP)
        before = computation.instructions[loop.operands[0]]
        compare = condition.root
        if "direction=LT" not in compare.text or {before.opcode, body.root.opcode} != {"tuple"}:
            return None
        counter = _element(condition, compare.operands[0])
        limit = _constant(condition, compare.operands[1])
        if counter is None or limit is None:
            return None
        start = _constant(computation, before.operands[counter])
        step = _step(body, counter)
        return None if start is None or not step else max(0, math.ceil((limit - start) / step))

    def asynchronous_computations(self) -> set[str]:
        """Computations that run at the same time as the instructions after their start."""
        executed = [i for name in self.runs() for i in self.computations[name].instructions.values()]
        return {name for i in executed if i.opcode in ASYNCHRONOUS for name in i.called}

    def loops_of_unknown_trip_count(self) -> list[str]:
        """The operations of loops whose bodies count once, because their trip count depends on the data."""
        executed = [(c, i) for c in map(self.computations.__getitem__, self.runs()) for i in c.instructions.values()]
        loops = [(c, i) for c, i in executed if i.opcode == "while"]
        return sorted({loop.op_name or loop.name for c, loop in loops if self.trip_count(c, loop) is None})

    def fused(self, instruction: Instruction) -> Computation | None:
        """The computation of a fusion, or None for other instructions."""
        return self.computations[instruction.called[0]] if instruction.opcode == "fusion" else None


def _origin(computation: Computation, name: str) -> Instruction:
    """The instruction that copies and bitcasts lead back to."""
    one = computation.instructions[name]
    return _origin(computation, one.operands[0]) if one.opcode in ("copy", "bitcast") else one


def _constant(computation: Computation, name: str) -> int | None:
    """The value of an instruction that is an integer constant, or None."""
    found = INTEGER.search(_origin(computation, name).text)
    return int(found[1]) if found else None


def match_of(pattern: str | re.Pattern, text: str) -> re.Match[str]:
    """The first match. Raises ValueError if there is none: then XLA writes its programs in another way."""
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in XLA's {text[:400]}")
    return match


def _element(computation: Computation, name: str) -> int | None:
    """The index of the element that an instruction takes from the computation's one parameter, a tuple, or None."""
    one = _origin(computation, name)
    of_parameter = one.opcode == "get-tuple-element" and computation.instructions[one.operands[0]].opcode == "parameter"
    return int(match_of(ELEMENT, one.text)[1]) if of_parameter else None


def _step(body: Computation, counter: int) -> int | None:
    """The constant that a loop's body adds to its counter, or None."""
    add = _origin(body, body.root.operands[counter])
    if add.opcode != "add":
        return None
    for one, other in (add.operands, add.operands[::-1]):
        if _element(body, one) == counter:
            return _constant(body, other)
    return None


def parse(text: str) -> Program:
    """The program of a text from JAX's `compiled.as_text()`."""
    computations = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if current is None:
            header = HEADER.match(line)
            if header and not line.startswith("HloModule"):
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif line == "}" or line.startswith("}, execution_thread"):
            current = None
        else:
            _add_line(line, current)
    return Program(computations, entry)


def _add_line(line: str, computation: Computation) -> None:
    """Adds a line to a computation: a new instruction, or attributes of the last one, which may span several lines."""
    instruction = _instruction(line)
    if instruction:
        computation.instructions[instruction.name] = instruction
    elif computation.instructions:
        computation.instructions[next(reversed(computation.instructions))].text += line


def _instruction(line: str) -> Instruction | None:
    start = LINE.match(line)
    if not start:
        return None
    shape, rest = _shape(line[start.end() :])
    opcode, _, rest = rest.partition("(")
    return Instruction(start[2], opcode.strip(), arrays(shape), _operands(rest), line, bool(start[1]))


def _shape(text: str) -> tuple[str, str]:
    """(the type, the text from the opcode on); the type of a tuple is in parentheses."""
    if not text.startswith("("):
        head, _, tail = text.partition(" ")
        return head, tail
    end = _closing(text, 1)
    return text[:end], text[end:].lstrip()


def _operands(rest: str) -> list[str]:
    inside = rest[: _closing(rest, 0) - 1]
    return NAME.findall(inside) or [
        word.split()[-1] for word in inside.split(", ") if re.fullmatch(r"[\w.\-]+", word.strip())
    ]


def _closing(text: str, start: int) -> int:
    """The index after the parenthesis that closes the one open at `start`."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def arrays(shape: str) -> list[Array]:
    read = []
    for dtype, sizes, layout in ARRAY.findall(shape):
        sizes = tuple(int(size) for size in sizes.split(",") if size)
        # Memory spaces S(0) and S(5) are not on-chip memory.
        read.append(Array(dtype, sizes, "S(" in layout and "S(0)" not in layout and "S(5)" not in layout))
    return read
