"""Device code of `moe_core.kernels.ops.dispatch` and `moe_core.kernels.ops.exchange`: tokens to the ranks of their
experts, and back.

Between GPUs of one host, memory of another rank is written by plain stores to its address.  A rank that has written all
of it then raises a signal there, by a release at the scope of the system; who waits for the signal reads by an acquire
what was written before it.  Signals are numbers of calls, which only grow, so none has to be reset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET, downcast
from moe_core.kernels.ops._quantize_kernels import divide_by, divisor_of, encode, magnitude_bits, scale_of, store_scale

# what `state` holds of a buffer, in 32-bit words: programs that have ended there and on the way back, the number of the
# call, and for each rank whether it was waited for in vain
ARRIVED = tl.constexpr(0)
RETURNED = tl.constexpr(1)
CALL = tl.constexpr(2)
LATE = tl.constexpr(4)


@triton.jit
def replica(ids, token, pair, mask, tables, offset):
    """Where the experts of slots `pair` of tokens are: rank * stride + local index, or -1.

    tables = (slots [E, R], counts [E], E, R): see `moe_core.parallel.placement.tables.ReplicaTables`.
    """
    slots, counts, experts, room = tables
    # ids may have 64 bits: compared before they are cut
    expert = tl.load(ids + pair, mask=mask, other=-1)
    known = mask & (expert >= 0) & (expert < experts)
    expert = tl.where(known, expert, 0).to(tl.int32)
    count = tl.load(counts + expert, mask=known, other=1)
    return tl.load(slots + expert * room + (token + offset) % count, mask=known, other=-1)


@triton.jit(do_not_specialize=["tokens", "offset"])
def position_kernel(
    ids,
    tables,
    positions,
    counts,
    tokens,
    ranks,
    stride,
    copies,
    offset,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r numbers the tokens that go to rank r, in their order: positions [M, ranks], else -1; counts [ranks].

    Each expert-parallel rank is `copies` ranks, which get the same tokens.
    """
    rank = tl.program_id(0)
    before = tl.program_id(0) * 0
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < tokens
        wanted = tl.zeros((BLOCK,), dtype=tl.int32)
        for j in tl.static_range(TOP_K):
            slot = replica(ids, token, token.to(tl.int64) * TOP_K + j, inside, tables, offset)
            wanted = tl.where((slot >= 0) & (slot // stride == rank // copies), 1, wanted)
        place = before + tl.cumsum(wanted, axis=0) - wanted
        tl.store(positions + token.to(tl.int64) * ranks + rank, tl.where(wanted > 0, place, -1), mask=inside)
        before += tl.sum(wanted, axis=0)
    tl.store(counts + rank, before)


@triton.jit
def part(base, start, row, width, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Address of row `row` of a part of a buffer: rows are `width` bytes apart from `start` on."""
    address = base + start + row * width
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def last_program(counter):
    """Whether all other programs of the launch have called this: what they wrote is seen, and can be passed on."""
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def signal_ranks(addresses, state, place, call, me, ranks, BLOCK_W: tl.constexpr):
    """Write `call` to the signal of rank `me` in the buffers of all ranks; signals start at byte `place`.

    Not where this rank has missed another one: it works on rows of calls before, and the others have to miss it too.
    """
    tl.debug_barrier()
    rank = tl.arange(0, BLOCK_W)
    late = tl.sum(tl.load(state + LATE + rank, mask=rank < ranks, other=0), axis=0)
    mask = rank < tl.where(late > 0, 0, ranks)
    address = tl.load(addresses + rank, mask=mask, other=0) + place + me * 4
    signal = address.to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(signal, tl.zeros((BLOCK_W,), tl.int32) + call, mask=mask, sem="release", scope="sys")


@triton.jit
def nanoseconds(lane):
    """The GPU's clock, read by each thread: lane [threads of the block], so that its largest value is one for all."""
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(now, axis=0)


@triton.jit
def wait_for_ranks(signals, state, addresses, step, ranks, limit, THREADS: tl.constexpr):
    """Wait until all ranks have signalled the call that `state` names; returns how many have not within the time-out.

    `limit` nanoseconds (in Triton's interpreter, which has no clock, a look counts as a second).  Missing ranks are
    noted in `state` and, with the number of the step, where the host reads it, at the address behind those of the
    ranks.  After that nobody waits any more.

    A thread of the block looks at one rank, and sums over the block decide: threads that looked twice at a signal could
    see two values of it, and leave the loop at different times.
    """
    rank = tl.arange(0, THREADS)
    inside = rank < ranks
    call = tl.load(state + CALL)
    late = tl.sum(tl.load(state + LATE + rank, mask=inside, other=0), axis=0)
    found = tl.load(signals + rank, mask=inside, other=call, volatile=True)
    left = tl.sum((found - call < 0).to(tl.int32), axis=0)
    limit = tl.where(late > 0, 0, limit).to(tl.int64)
    waited = limit * 0
    begin = waited
    if not INTERPRET:
        begin = nanoseconds(rank)
    while (left > 0) & (waited < limit):
        found = tl.load(signals + rank, mask=inside, other=call, volatile=True)
        left = tl.sum((found - call < 0).to(tl.int32), axis=0)
        if INTERPRET:
            waited += 1000000000
        else:
            waited = nanoseconds(rank) - begin
    # the acquire: what ranks wrote before their signals is seen from here on
    found = tl.atomic_add(signals + rank, tl.zeros((THREADS,), tl.int32), mask=inside, sem="acquire", scope="sys")
    tl.debug_barrier()
    missing = inside & (found - call < 0)
    left = tl.sum(missing.to(tl.int32), axis=0)
    if left > 0:
        noted = tl.zeros((THREADS,), tl.int32) + step
        tl.store(state + LATE + rank, noted, mask=missing)
        if late == 0:
            alarm = tl.load(addresses + ranks) + rank * 4
            tl.store(alarm.to(tl.pointer_type(tl.int32)), noted, mask=missing)
    return left + late


@triton.jit
def token_codes(
    x,
    token,
    chunk,
    tokens,
    columns,
    stride_x,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    dtype: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """(codes, scale, group, column, mask) of GROUPS groups of GROUP columns of a token; zeros of one that is none."""
    group = chunk * GROUPS + tl.arange(0, GROUPS)[:, None]
    column = group * GROUP + tl.arange(0, GROUP)[None, :]
    mask = column < tl.where(token < tokens, columns, 0)
    values = tl.load(x + token.to(tl.int64) * stride_x + column, mask=mask, other=0.0)
    if CODE != "":
        values = values.to(tl.float32)
        scale = scale_of(tl.max(magnitude_bits(values), axis=1, keep_dims=True), CODE, SCALE)
        divisor, inverse = divisor_of(scale)
        codes = encode(divide_by(values, divisor, inverse), CODE, dtype)
    else:
        codes = values
        scale = 0
    return codes, scale, group, column, mask


@triton.jit(do_not_specialize=["me"])
def signal_kernel(addresses, state, place, me, ranks, NEXT: tl.constexpr, BLOCK_W: tl.constexpr, PDL: tl.constexpr):
    """Signals to all ranks what the launches before it have written; NEXT: of a call that begins."""
    call = tl.load(state + CALL)
    if NEXT:
        call += 1
        tl.debug_barrier()
        tl.store(state + CALL, call)
    signal_ranks(addresses, state, place, call, me, ranks, BLOCK_W)


@triton.jit(do_not_specialize=["tokens", "offset", "me", "capacity"])
def dispatch_kernel(
    x,
    ids,
    weights,
    adapters,
    tables,
    out,
    addresses,
    positions,
    counts,
    places,
    layout,
    state,
    signals,
    tokens,
    columns,
    stride_x,
    stride,
    copies,
    offset,
    ranks,
    me,
    capacity,
    CODE: tl.constexpr,
    SCALE: tl.constexpr,
    dtype: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIGNAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, c) quantises GROUPS groups of GROUP columns of token t and writes them for all ranks that need them.

    With `positions` into `out`, rank after rank, a rank's tokens by their positions.  Without them into the buffers
    at `addresses`, as row me * capacity + t; there every row up to the capacity gets expert numbers, of no expert where
    nothing comes, and with SIGNAL the last program signals.  layout = (first byte, bytes of a row) of hidden states,
    scales, router weights, expert numbers, adapters.  places [M, ranks]: row of what comes back, -1 for nothing.
    """
    token = tl.program_id(0)
    chunk = tl.program_id(1)
    hidden_at, hidden_row, scale_at, scale_row, weight_at, weight_row, id_at, id_row, adapter_at, adapter_row = layout
    slot_index = tl.arange(0, BLOCK_K)
    # one comparison: Triton 3.9's interpreter has no mask that is a scalar's and a block's
    inside = tl.where(token < tokens, slot_index, TOP_K) < TOP_K
    pair = token.to(tl.int64) * TOP_K + slot_index
    slot = replica(ids, token, pair, inside, tables, offset)
    owner = tl.where(slot >= 0, slot // stride, -1)
    router = tl.load(weights + pair, mask=inside, other=0.0)

    codes, scale, group, column, mask = token_codes(
        x, token, chunk, tokens, columns, stride_x, CODE, SCALE, dtype, GROUPS, GROUP
    )
    first = tl.program_id(0) * 0
    for rank in range(ranks):
        here = (owner == rank // copies) & (slot >= 0)
        wanted = tl.max(here.to(tl.int32), axis=0) > 0
        if positions is not None:
            base = out.to(tl.int64)
            at = tl.load(positions + token.to(tl.int64) * ranks + rank)
            row = (first + at).to(tl.int64)
            back = first + at
            first += tl.load(counts + rank)
        else:
            base = tl.load(addresses + rank)
            row = (me * capacity + token).to(tl.int64)
            back = rank * capacity + token
            if chunk == 0:
                numbers = part(base, id_at, row, id_row, tl.int32, False)
                tl.store(numbers + slot_index, tl.where(here, slot % stride, -1), mask=slot_index < TOP_K)
        if chunk == 0:
            tl.store(places + token.to(tl.int64) * ranks + rank, tl.where(wanted, back, -1), mask=token < tokens)
        if wanted:
            hidden = part(base, hidden_at, row, hidden_row, dtype, ALIGNED)
            tl.store(hidden + column, codes, mask=mask)
            if CODE != "":
                scales = part(base, scale_at, row, scale_row, tl.uint8 if SCALE == "e8m0" else tl.float32, False)
                store_scale(scales + group, scale, group * GROUP < columns, SCALE)
            if chunk == 0:
                if positions is not None:
                    numbers = part(base, id_at, row, id_row, tl.int32, False)
                    tl.store(numbers + slot_index, tl.where(here, slot % stride, -1), mask=slot_index < TOP_K)
                sent = part(base, weight_at, row, weight_row, tl.float32, False)
                tl.store(sent + slot_index, router, mask=inside)
                if adapters is not None:
                    tl.store(part(base, adapter_at, row, adapter_row, tl.int32, False), tl.load(adapters + token))
    if SIGNAL:
        if last_program(state + ARRIVED):
            call = tl.load(state + CALL) + 1
            tl.debug_barrier()  # warps with ranks of their own load it too
            tl.store(state + CALL, call)
            signal_ranks(addresses, state, signals, call, me, ranks, BLOCK_W)


@triton.jit(do_not_specialize=["step", "limit"])
def wait_kernel(signals, state, addresses, step, ranks, limit, THREADS: tl.constexpr, PDL: tl.constexpr):
    """One program waits for all ranks."""
    wait_for_ranks(signals, state, addresses, step, ranks, limit, THREADS)


@triton.jit(do_not_specialize=["me", "capacity"])
def return_kernel(
    partial,
    ids,
    addresses,
    state,
    signals,
    returned,
    row_bytes,
    columns,
    stride,
    ranks,
    me,
    capacity,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ALIGNED: tl.constexpr,
    SIGNAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (p, c) writes columns of a row of partial [ranks * capacity, K] to the rank that the token came from.

    There row m is row me * capacity + m % capacity of what starts at byte `returned`.  Rows without an expert here
    stay.  With SIGNAL the last program signals.

    Neighbouring programs have rows of different ranks, each rank beginning with its own: were all ranks to begin with
    the rows of rank 0, its link would carry them while the others' wait.
    """
    source, token = (tl.program_id(0) + me) % ranks, tl.program_id(0) // ranks
    index = source * capacity + token
    slot = tl.arange(0, BLOCK_K)
    expert = tl.load(ids + index.to(tl.int64) * TOP_K + slot, mask=slot < TOP_K, other=-1)
    if tl.max(expert, axis=0) >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(partial + index.to(tl.int64) * stride + column, mask=column < columns, other=0.0)
        base = tl.load(addresses + source)
        row = (me * capacity + token).to(tl.int64)
        target = part(base, returned, row, row_bytes, partial.dtype.element_ty, ALIGNED)
        tl.store(target + column, values, mask=column < columns)
    if SIGNAL:
        if last_program(state + RETURNED):
            signal_ranks(addresses, state, signals, tl.load(state + CALL), me, ranks, BLOCK_W)


@triton.jit(do_not_specialize=["limit"])
def combine_kernel(
    returned,
    places,
    output,
    signals,
    state,
    addresses,
    columns,
    stride_returned,
    stride_output,
    ranks,
    limit,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
    WAIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """output[t] = sum over ranks, ascending, of returned[places[t, rank]], in float32; NaN where ranks are missing.

    Each program waits for the ranks; without WAIT a launch before this one has done so.
    """
    if WAIT:
        missing = wait_for_ranks(signals, state, addresses, 2, ranks, limit, THREADS)
    else:
        lane = tl.arange(0, THREADS)
        missing = tl.sum(tl.load(state + LATE + lane, mask=lane < ranks, other=0), axis=0)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in range(ranks):
        row = tl.load(places + token * ranks + rank)
        mask = column < tl.where(row >= 0, columns, 0)
        # another GPU writes it: not by way of the first-level cache
        values = tl.load(
            returned + row.to(tl.int64) * stride_returned + column, mask=mask, other=0.0, cache_modifier=".cg"
        )
        total += values.to(tl.float32)
    total = tl.where(missing > 0, float("nan"), total)
    tl.store(output + token * stride_output + column, downcast(total, output.dtype.element_ty), mask=column < columns)
