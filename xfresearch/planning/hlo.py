"""A compiled program's text (optimised HLO) as computations of instructions, each with how often it runs in one step.

The compiler's own counts take the body of a loop once. Here a body counts as often as its loop turns, which stands in the
loop's `known_trip_count` (CPU and GPU) or follows from its counter: where it starts, how far it steps, and the constant
that the condition compares it with (TPU).
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
ASYNCHRONOUS = {"async-start", "call-start"}  # a TPU's other cores take the second
CALLS = {"call", "conditional"} | ASYNCHRONOUS
OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Array:
    dtype: str
    shape: tuple[int, ...]
    fast: bool  # in the memory on the chip that is not HBM

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> float:
        width = BYTES.get(self.dtype)
        if width is None:
            width = int(re.search(r"\d+", self.dtype)[0]) / 8
        return self.size * width


@dataclass
class Instruction:
    name: str
    opcode: str
    outputs: list[Array]  # one, or those of a tuple
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

    def parameters(self) -> list[Instruction]:
        """In the order of the call's operands."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(re.search(r" parameter\((\d+)\)", i.text)[1]))


@dataclass
class Program:
    computations: dict[str, Computation]
    entry: str

    def runs(self) -> dict[str, float]:
        """How often each computation that is not fused into an instruction runs in one step."""
        found = {}

        def visit(name: str, times: float) -> None:
            found[name] = found.get(name, 0) + times
            for instruction in self.computations[name].instructions.values():
                if instruction.opcode == "while":
                    turns = self.turns(self.computations[name], instruction)
                    for inner in instruction.called:
                        visit(inner, times * (1 if turns is None else turns))
                elif instruction.opcode in CALLS:
                    for inner in instruction.called:
                        visit(inner, times)

        visit(self.entry, 1)
        return found

    def turns(self, computation: Computation, loop: Instruction) -> int | None:
        """How often the body of a computation's loop runs; None where that cannot be read or depends on the data.

        A product that a TPU takes apart to pass its pieces around a ring does two of them a turn: its counter steps by 2.
        """
        stated = TRIPS.search(loop.text)
        if stated:
            return int(stated[1])
        condition, body = (self.computations[re.search(rf"{name}=%?([\w.\-]+)", loop.text)[1]] for name in LOOP)
        before = computation.instructions[loop.operands[0]]
        compare = condition.root
        if "direction=LT" not in compare.text or {before.opcode, body.root.opcode} != {"tuple"}:
            return None
        counter, limit = _element(condition, compare.operands[0]), _constant(condition, compare.operands[1])
        if counter is None or limit is None:
            return None
        start, step = _constant(computation, before.operands[counter]), _step(body, counter)
        return None if start is None or not step else max(0, math.ceil((limit - start) / step))

    def beside(self) -> set[str]:
        """Computations that run beside what follows their start."""
        executed = [i for name in self.runs() for i in self.computations[name].instructions.values()]
        return {name for i in executed if i.opcode in ASYNCHRONOUS for name in i.called}

    def loops_of_unknown_turns(self) -> list[str]:
        """What the loops are for whose bodies count once, because how often they turn depends on the data."""
        executed = [(c, i) for c in map(self.computations.get, self.runs()) for i in c.instructions.values()]
        return sorted({i.op_name or i.name for c, i in executed if i.opcode == "while" and self.turns(c, i) is None})

    def fused(self, instruction: Instruction) -> Computation | None:
        """What a fusion computes."""
        return self.computations[instruction.called[0]] if instruction.opcode == "fusion" else None


def _origin(computation: Computation, name: str) -> Instruction:
    """What an instruction copies, or itself."""
    one = computation.instructions[name]
    return _origin(computation, one.operands[0]) if one.opcode in ("copy", "bitcast") else one


def _constant(computation: Computation, name: str) -> int | None:
    """The integer that an instruction is a constant of."""
    found = INTEGER.search(_origin(computation, name).text)
    return int(found[1]) if found else None


def _element(computation: Computation, name: str) -> int | None:
    """Which element of the computation's one parameter, a tuple, an instruction is."""
    one = _origin(computation, name)
    of_parameter = one.opcode == "get-tuple-element" and computation.instructions[one.operands[0]].opcode == "parameter"
    return int(ELEMENT.search(one.text)[1]) if of_parameter else None


def _step(body: Computation, counter: int) -> int | None:
    """What a loop's body adds to the element that counts."""
    add = _origin(body, body.root.operands[counter])
    if add.opcode != "add":
        return None
    for one, other in (add.operands, add.operands[::-1]):
        if _element(body, one) == counter:
            return _constant(body, other)
    return None


def parse(text: str) -> Program:
    """The program of the text that jax's `compiled.as_text()` gives."""
    computations, entry, here = {}, "", None
    for line in text.splitlines():
        if here is None:
            header = HEADER.match(line)
            if header and not line.startswith("HloModule"):
                here = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif line == "}" or line.startswith("}, execution_thread"):
            here = None
        else:
            _read(line, here)
    return Program(computations, entry)


def _read(line: str, here: Computation) -> None:
    """Adds a line to a computation: an instruction, or more of the last one, whose attributes may go over several lines."""
    instruction = _instruction(line)
    if instruction:
        here.instructions[instruction.name] = instruction
    elif here.instructions:
        here.instructions[next(reversed(here.instructions))].text += line


def _instruction(line: str) -> Instruction | None:
    start = LINE.match(line)
    if not start:
        return None
    shape, rest = _shape(line[start.end() :])
    opcode, _, rest = rest.partition("(")
    return Instruction(start[2], opcode.strip(), arrays(shape), _operands(rest), line, bool(start[1]))


def _shape(text: str) -> tuple[str, str]:
    """The type before the opcode, which is in parentheses where it is a tuple, and what follows."""
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
    """Where the parenthesis that is open at `start` ends, the closing one included."""
    depth = 1
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def arrays(shape: str) -> list[Array]:
    found = []
    for dtype, sizes, layout in ARRAY.findall(shape):
        sizes = tuple(int(size) for size in sizes.split(",") if size)
        found.append(Array(dtype, sizes, "S(" in layout and "S(0)" not in layout and "S(5)" not in layout))
    return found
