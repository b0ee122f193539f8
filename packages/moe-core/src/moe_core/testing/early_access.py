"""Looks in PTX for what a kernel does in global memory before it has waited for the launch before it.

With programmatic dependent launch (:mod:`moe_core.kernels.device.pdl`) a kernel's first programs run while the launch
before it still does.  Before `griddepcontrol.wait` they may read what is older than that launch, and write what it
neither reads nor writes; :data:`ALLOWED` says of each kernel what that is.  The rest is a race, which a test on a GPU
rarely shows.

All paths from the entry are followed as far as the wait, those that end without one too: their programs rely on the
wait of another.  The registers of an address lead back to the kernel's pointers; a number that was loaded from memory
only counts elements.  Where warps are specialised, all but the first ones begin at a barrier of the whole program, to
which the first ones come when these may go on.  If that is behind the wait, the others have waited too.

The text is that of Triton 3.6 to 3.9.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Allowed(NamedTuple):
    """What a kernel may do before it waits: read from the arguments ``reads``, and write zeros to ``zeros``.

    ``where``: (argument, place inside of it …) of a constant, and the value that it must have; else nothing is allowed.
    """

    reads: frozenset[str]
    zeros: frozenset[str] = frozenset()
    where: tuple[tuple[str | int, ...], object] | None = None


_SECOND = (("SECOND",), True)
_OF_GEMV = frozenset({"row_args", "b_args"})

#: by the kernel's name; of others nothing
ALLOWED: Mapping[str, Allowed] = {
    # gemm2, whose epilogue has the activation "": what is before it has waited for the sort
    "grouped_gemm_kernel": Allowed(frozenset({"schedule", "b_args"}), where=(("epilogue", 4), "")),
    # routing is from before gemm1; the zeros are `moe_core.kernels.gemm.tiles.finalize.store_zeros`
    "gemv_kernel": Allowed(_OF_GEMV, frozenset({"result"}), _SECOND),
    "gemv_mma_kernel": Allowed(_OF_GEMV, frozenset({"result"}), _SECOND),
    "scaled_gemv_kernel": Allowed(_OF_GEMV, where=_SECOND),
    # routing is from before the launch that makes y
    "reduce_kernel": Allowed(frozenset({"ids", "expert_map"})),
}


class Access(NamedTuple):
    """An instruction on global memory, and the numbers of the pointers among the parameters that its address is from.

    ``zeros``: it stores nothing but zeros.
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
# pointers, and tensor descriptors as they are
_POINTER = re.compile(r"\.ptr\b.*_param_(\d+)\b|_param_(\d+)\[")
_ACCESS = re.compile(r"(?:ldu?|st|atom|red|cp|prefetchu?|discard|applypriority|multimem|tensormap)\.")
_GLOBAL = re.compile(r"\.global\b")
_ELSEWHERE = re.compile(r"\.(?:shared|local|param|const)\b|\.(?:commit|wait)_(?:group|all)")
_ZERO = re.compile(r"0|0x0+|0[fd]0+")


def waits(ptx: str) -> bool:
    """Whether the kernel waits for the launch before it at all."""
    return _WAIT in ptx


def early_accesses(ptx: str) -> list[Access]:
    """What may happen in global memory before the wait, each kind once, in the order of the text."""
    head, _, body = ptx[ptx.index(".entry") :].partition("{")
    code, labels = _parse(body)
    gates = {at for at, one in enumerate(code) if one.operation == "barrier.sync" and one.operands == "1"}
    reached = _reached(code, labels, gates)
    if len(gates & reached) > 1 or len(gates) == 1:
        # the first ones come to it before they have waited, or nobody else does
        reached = _reached(code, labels, set())
    accesses = [code[at] for at in sorted(reached) if _is_access(code[at].operation)]
    if not accesses:
        return []
    pointers = {int(number) for found in _POINTER.findall(head) for number in found if number}
    origins = _Origins(code)
    return list(dict.fromkeys(_access(one, origins, pointers) for one in accesses))


def refused_accesses(kernel: str, constants: Mapping[tuple[str | int, ...], object], ttgir: str, ptx: str) -> list[str]:
    """Those of :func:`early_accesses` that :data:`ALLOWED` does not allow, with the names of the arguments.

    ``constants``: the kernel's, by (argument, place inside of it …); its parameters have their names from ``ttgir``.
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
    """The arguments that the parameters are, or are parts of."""
    signature = re.search(r"tt\.func public @.*", ttgir)
    return dict(enumerate(re.findall(r'loc\("([^".]+)', signature[0]))) if signature is not None else {}


def _parse(body: str) -> tuple[list[_Instruction], dict[str, int]]:
    """The instructions, and of each label the number of the one behind it."""
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
    """The instructions that may run before the wait and, with them, the first of ``stops``."""
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
            # those of inline assembly, which has blocks of its own, go back to what has been reached
            known = [labels[target] for target in targets if target.startswith("$L")]
            starts += known
            if not one.predicated and (known or one.operation in ("ret", "exit", "trap")):
                break
            at += 1
    return reached


def _is_access(operation: str) -> bool:
    # what a function does is not looked at
    if operation.startswith("call"):
        return True
    elsewhere = _GLOBAL.search(operation) is None and _ELSEWHERE.search(operation) is not None
    return _ACCESS.match(operation) is not None and not elsewhere


class _Origins:
    """Where the values of registers are from."""

    def __init__(self, code: list[_Instruction]) -> None:
        #: of each register the instructions that write it: operation and what is behind the registers written
        self.writes: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for one in code:
            written = re.match(r"\{[^}]*\}|[^,]*", one.operands)
            if written is not None and one.operands.startswith(("%", "{")):
                for register in _REGISTER.findall(written[0]):
                    self.writes[register].append((one.operation, one.operands[written.end() :]))

    def _follow(self, text: str, visit: Callable[[str, str], bool]) -> None:
        """Call ``visit`` with all that the registers in ``text`` are from, as long as it returns True for one."""
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
        """Numbers of the parameters that the registers in ``text`` are computed from, unless by way of memory."""
        found = {int(number) for number in _PARAMETER.findall(text)}

        def visit(operation: str, operands: str) -> bool:
            if _ACCESS.match(operation) and not operation.startswith("ld.param"):
                return False
            found.update(int(number) for number in _PARAMETER.findall(operands))
            return True

        self._follow(text, visit)
        return found

    def zero(self, text: str) -> bool:
        """Whether the values in ``text`` are zeros."""
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
