"""Find global memory accesses in PTX before a kernel waits for the preceding launch.

With programmatic dependent launch (:mod:`moe_core.kernels.device.pdl`), the first CTAs of a kernel run while the
preceding launch is still running. Before `griddepcontrol.wait` they may read data that is older than that launch, and
write data that it neither reads nor writes. :data:`ALLOWED` states these accesses for each kernel. All others are
races, which a test on a GPU rarely shows.

All paths from the entry to the wait are followed, including those that end without a wait: their CTAs rely on the wait
of another CTA. The registers of an address are traced back to the kernel's pointers; a number loaded from memory only
counts elements. In a warp-specialized kernel, all but the first warps begin at a barrier of the whole CTA. The first
warps arrive at it when the others may proceed. If they do so after the wait, the other warps have waited too.

The patterns match the PTX of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Allowed(NamedTuple):
    """Accesses that a kernel may make before it waits.

    Attributes:
        reads: Arguments that it may read.
        zeros: Arguments that it may write zeros to.
        where: (argument, place inside of it …) of a constant, and its required value. If the value differs, nothing is
            allowed.
    """

    reads: frozenset[str]
    zeros: frozenset[str] = frozenset()
    where: tuple[tuple[str | int, ...], object] | None = None


_SECOND = (("SECOND",), True)
_OF_GEMV = frozenset({"row_args", "b_args"})

#: allowed accesses by kernel name; other kernels may access nothing
ALLOWED: Mapping[str, Allowed] = {
    # gemm2, whose epilogue has the activation "": the launch before it has waited for the sort
    "grouped_gemm_kernel": Allowed(frozenset({"schedule", "b_args"}), where=(("epilogue", 4), "")),
    # Routing is older than gemm1. `moe_core.kernels.gemm.tiles.finalize.store_zeros` writes the zeros.
    "gemv_kernel": Allowed(_OF_GEMV, frozenset({"result"}), _SECOND),
    "gemv_mma_kernel": Allowed(_OF_GEMV, frozenset({"result"}), _SECOND),
    "scaled_gemv_kernel": Allowed(_OF_GEMV, where=_SECOND),
    # Routing is older than the launch that makes y.
    "reduce_kernel": Allowed(frozenset({"ids", "expert_map"})),
}


class Access(NamedTuple):
    """An instruction on global memory.

    Attributes:
        operation: The PTX operation.
        parameters: Numbers of the pointer parameters that its address derives from.
        zeros: Whether it stores only zeros.
    """

    operation: str
    parameters: frozenset[int]
    zeros: bool

    @property
    def reads(self) -> bool:
        """Whether it is a load, a prefetch or a copy to shared memory."""
        return re.match(r"ldu?\.|prefetchu?\.|cp\.async\.(?!.*\.global\.shared)", self.operation) is not None


class _Instruction(NamedTuple):
    predicated: bool
    operation: str
    operands: str


_WAIT = "griddepcontrol.wait"
_COMMENT = re.compile(r"//.*|^[ \t]*\.(?:loc|file)\b.*", re.MULTILINE)
_LABEL = re.compile(r"([\w$]+):(?!:)[\s{}]*")
_INSTRUCTION = re.compile(r"(@!?[%\w]+\s+)?([.\w:]+)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%\w+")
_PARAMETER = re.compile(r"_param_(\d+)\b")
# pointers, and tensor descriptors passed by value
_POINTER = re.compile(r"\.ptr\b.*_param_(\d+)\b|_param_(\d+)\[")
_ACCESS = re.compile(r"(?:ldu?|st|atom|red|cp|prefetchu?|discard|applypriority|multimem|tensormap)\.")
_GLOBAL = re.compile(r"\.global\b")
_ELSEWHERE = re.compile(r"\.(?:shared|local|param|const)\b|\.(?:commit|wait)_(?:group|all)")
_ZERO = re.compile(r"0|0x0+|0[fd]0+")


def waits(ptx: str) -> bool:
    """Whether the kernel waits for the preceding launch at all.

    Args:
        ptx: PTX of the kernel.

    Returns:
        True if it has a wait.
    """
    return _WAIT in ptx


def early_accesses(ptx: str) -> list[Access]:
    """Return the accesses to global memory that may happen before the wait.

    Args:
        ptx: PTX of the kernel.

    Returns:
        Each kind of access once, in the order of the text.
    """
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    code, labels = _parse(body)
    gates = {at for at, one in enumerate(code) if one.operation == "barrier.sync" and one.operands == "1"}
    reached = _reached(code, labels, gates)
    if len(gates & reached) > 1 or len(gates) == 1:
        # The first warps arrive at the barrier before they have waited, or no other warps use it.
        reached = _reached(code, labels, set())
    accesses = [code[at] for at in sorted(reached) if _is_access(code[at].operation)]
    if not accesses:
        return []
    pointers = {int(number) for found in _POINTER.findall(head) for number in found if number}
    origins = _Origins(code)
    return list(dict.fromkeys(_access(one, origins, pointers) for one in accesses))


def refused_accesses(kernel: str, constants: Mapping[tuple[str | int, ...], object], ttgir: str, ptx: str) -> list[str]:
    """Return the :func:`early_accesses` that :data:`ALLOWED` does not allow.

    Args:
        kernel: Name of the kernel.
        constants: Its constants, by (argument, place inside of it …).
        ttgir: TTGIR, which has the names of the parameters.
        ptx: PTX of the kernel.

    Returns:
        Descriptions of the accesses, with the names of the arguments.
    """
    allowed = ALLOWED.get(kernel)
    if allowed is None or (allowed.where is not None and constants.get(allowed.where[0]) != allowed.where[1]):
        allowed = Allowed(frozenset())
    refused = []
    names = None
    for access in early_accesses(ptx):
        names = names or _parameter_names(ttgir)
        arguments = {names.get(number, f"parameter {number}") for number in access.parameters}
        permitted = allowed.reads if access.reads else allowed.zeros if access.zeros else frozenset()
        if not arguments or not arguments <= permitted:
            refused.append(f"{access.operation} of {' or '.join(sorted(arguments)) or 'an unknown address'}")
    return list(dict.fromkeys(refused))


def _parameter_names(ttgir: str) -> dict[int, str]:
    """Map parameter numbers to the arguments that they are, or are parts of."""
    signature = re.search(r"tt\.func public @.*", ttgir)
    return dict(enumerate(re.findall(r'loc\("([^".]+)', signature[0]))) if signature is not None else {}


def _parse(body: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Return the instructions, and for each label the index of the instruction after it."""
    code: list[_Instruction] = []
    labels: dict[str, int] = {}
    for statement in _COMMENT.sub("", body).split(";"):
        text = statement.lstrip(" \t\r\n{}")
        while (label := _LABEL.match(text)) is not None:
            labels[label[1]] = len(code)
            text = text[label.end() :]
        instruction = _INSTRUCTION.match(text)
        if instruction is not None:
            code.append(_Instruction(instruction[1] is not None, instruction[2], instruction[3].strip()))
    return code, labels


def _reached(code: list[_Instruction], labels: dict[str, int], stops: set[int]) -> set[int]:
    """Return the instructions that may run before the wait, including the first of ``stops``."""
    reached: set[int] = set()
    starts = [0]
    while starts:
        at = starts.pop()
        while at < len(code) and at not in reached:
            one = code[at]
            if one.operation == _WAIT and not one.predicated:
                break
            reached.add(at)
            if at in stops:
                break
            targets: list[str] = []
            if one.operation.startswith("bra"):
                targets = [one.operands]
            elif one.operation.startswith("brx"):
                table = code[labels[one.operands.rpartition(",")[2].strip()]]
                targets = [target.strip() for target in table.operands.split(",")]
            # Branches of inline assembly, which has separate blocks, go back to reached instructions.
            known = [labels[target] for target in targets if target.startswith("$L")]
            starts += known
            if not one.predicated and (known or one.operation in ("ret", "exit", "trap")):
                break
            at += 1
    return reached


def _is_access(operation: str) -> bool:
    # Bodies of called functions are not analyzed.
    if operation.startswith("call"):
        return True
    elsewhere = _GLOBAL.search(operation) is None and _ELSEWHERE.search(operation) is not None
    return _ACCESS.match(operation) is not None and not elsewhere


class _Origins:
    """Def-use chains of PTX registers: trace an address operand back to kernel parameters."""

    def __init__(self, code: list[_Instruction]) -> None:
        #: for each register the instructions that write it: operation, and the operands after the written registers
        self.writes: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for one in code:
            written = re.match(r"\{[^}]*\}|[^,]*", one.operands)
            if written is not None and one.operands.startswith(("%", "{")):
                for register in _REGISTER.findall(written[0]):
                    self.writes[register].append((one.operation, one.operands[written.end() :]))

    def _follow(self, text: str, visit: Callable[[str, str], bool]) -> None:
        """Call ``visit`` for everything that the registers in ``text`` derive from.

        A chain ends where ``visit`` returns False.
        """
        seen: set[str] = set()
        registers = _REGISTER.findall(text)
        while registers:
            register = registers.pop()
            if register not in seen:
                seen.add(register)
                for operation, operands in self.writes.get(register, ()):
                    if visit(operation, operands):
                        registers += _REGISTER.findall(operands)

    def parameters(self, text: str) -> set[int]:
        """Return the parameters that the registers in ``text`` derive from without a memory access.

        Args:
            text: Operands of an instruction.

        Returns:
            Numbers of the parameters.
        """
        found = {int(number) for number in _PARAMETER.findall(text)}

        def visit(operation: str, operands: str) -> bool:
            if _ACCESS.match(operation) and not operation.startswith("ld.param"):
                return False
            found.update(int(number) for number in _PARAMETER.findall(operands))
            return True

        self._follow(text, visit)
        return found

    def zero(self, text: str) -> bool:
        """Whether the values in ``text`` are zeros.

        Args:
            text: Operands of an instruction.

        Returns:
            True if all are zero constants.
        """
        values = [text]
        others = False

        def visit(operation: str, operands: str) -> bool:
            nonlocal others
            others |= not operation.startswith("mov.")
            values.append(operands)
            return not others

        self._follow(text, visit)
        words = [word for value in values for word in re.split(r"[\s,{}]+", value) if word]
        return not others and all(
            word in self.writes if word.startswith("%") else _ZERO.fullmatch(word) is not None for word in words
        )


def _access(one: _Instruction, origins: _Origins, pointers: set[int]) -> Access:
    addresses = " ".join(re.findall(r"\[[^\]]*\]", one.operands))
    stored = one.operands.rpartition("]")[2]
    zeros = one.operation.startswith("st.") and origins.zero(stored)
    return Access(one.operation, frozenset(origins.parameters(addresses) & pointers), zeros)
