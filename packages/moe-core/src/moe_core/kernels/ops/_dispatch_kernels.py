"""Kernels of `moe_core.kernels.ops.dispatch` and `moe_core.kernels.ops.exchange`.

Between GPUs of one host, a rank writes the memory of a peer by plain stores to its address. Once all data is written,
it sets a signal in the peer's memory by a release at system scope. The peer waits for the signal by an acquire, after
which it sees the data. Signals are call numbers, which only grow, so they are never reset.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_core.kernels.device.casts import INTERPRET, downcast
from moe_core.kernels.ops._quantize_kernels import divide_by, divisor_of, encode, magnitude_bits, scale_of, store_scale

# offsets in `state`, in 32-bit words: counters of finished programs of dispatch and return, the number of the call, and
# for each rank whether waiting for it timed out
ARRIVED = tl.constexpr(0)
RETURNED = tl.constexpr(1)
CALL = tl.constexpr(2)
LATE = tl.constexpr(4)


@triton.jit
def replica(ids, token, pair, mask, tables, offset):
    """Return the replica of the expert of each pair, as rank * stride + local index, or -1.

    tables = (slots [E, R], counts [E], E, R): see `moe_core.parallel.placement.tables.ReplicaTables`.
    """
    slots, counts, experts, room = tables
    # ids may have 64 bits: compare before truncation
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
    """Number the tokens for rank r (program r) in token order.

    Writes positions [M, ranks], -1 for tokens that do not go there, and counts [ranks]. Each expert-parallel rank is
    `copies` ranks, which get the same tokens.
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
    """Return the address of row `row` of a field.

    Rows are `width` bytes apart and start at byte `start`.
    """
    address = base + start + row * width
    pointer = address.to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def last_program(counter):
    """Report whether this program is the last one of the launch to call it.

    The writes of all other programs are then visible, and may be released.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def signal_ranks(addresses, state, place, call, me, ranks, BLOCK_W: tl.constexpr):
    """Write `call` to the signal of rank `me` in the buffers of all ranks.

    Signals start at byte `place`. After a timeout this rank does not signal: its rows are stale, and the other ranks
    must time out too.
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
    """Read the GPU's clock, with the same result in all threads of the block.

    Each thread reads it, for lane [threads of the block], and all get the maximum.
    """
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l,r", [lane], dtype=tl.int64, is_pure=False, pack=1)
    return tl.max(now, axis=0)


@triton.jit
def wait_for_ranks(signals, state, addresses, step, ranks, limit, THREADS: tl.constexpr):
    """Wait until all ranks have signaled the call in `state`.

    Returns the number of ranks that have timed out. The limit is in nanoseconds. Triton's interpreter has no clock, so
    there each poll counts as a second. Missing ranks are noted in `state` and, with the number of the step, in host
    memory, whose address follows those of the ranks. After a timeout no further call waits.

    Each thread of the block polls one rank, and sums over the block decide. If threads polled the same signal, they
    could see different values and leave the loop at different times.
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
    # the acquire makes visible what the ranks wrote before they signaled
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
    """Load and quantize GROUPS groups of GROUP columns of a token.

    Returns (codes, scale, group, column, mask); a token past the last one is zero.
    """
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
    """Signal to all ranks that previous launches have completed their writes.

    NEXT begins a new call.
    """
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
    """Quantize columns of a token and write them for all ranks that need them.

    Program (t, c) handles GROUPS groups of GROUP columns of token t.

    With `positions`, the destination is `out`, ordered by rank, and by position within a rank. Without it, the
    destination is row me * capacity + t of the buffers at `addresses`. There every row up to the capacity gets expert
    numbers (none if no token arrives), and with SIGNAL the last program signals.

    layout = (first byte, bytes of a row) of hidden states, scales, router weights, expert numbers, adapters.
    places [M, ranks]: row of the returned result, -1 for none.
    """
    token = tl.program_id(0)
    chunk = tl.program_id(1)
    hidden_at, hidden_row, scale_at, scale_row, weight_at, weight_row, id_at, id_row, adapter_at, adapter_row = layout
    slot_index = tl.arange(0, BLOCK_K)
    # one comparison: Triton 3.9's interpreter cannot combine the mask of a scalar with that of a block
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
            tl.debug_barrier()  # other warps load the number of the call too
            tl.store(state + CALL, call)
            signal_ranks(addresses, state, signals, call, me, ranks, BLOCK_W)


@triton.jit(do_not_specialize=["step", "limit"])
def wait_kernel(signals, state, addresses, step, ranks, limit, THREADS: tl.constexpr, PDL: tl.constexpr):
    """Wait for all ranks, in one program."""
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
    """Return columns of a row of partial results to the rank that owns the token.

    Program (p, c) handles columns c of a row of partial [ranks * capacity, K]. Row m of `partial` becomes row me *
    capacity + m % capacity of the owner's results, which start at byte `returned`. Rows without a local expert are not
    sent. With SIGNAL the last program signals.

    Consecutive programs send rows to different ranks, and each rank starts with itself. If all ranks started with the
    rows of rank 0, its link would be the bottleneck while the others idle.
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
    """Sum the results of all ranks for each token, in float32, ranks ascending.

    output[t] is the sum over ranks of returned[places[t, rank]], or NaN after a timeout. With WAIT each program waits
    for the ranks; otherwise a previous launch has waited.
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
        # another GPU writes this data: bypass L1
        values = tl.load(
            returned + row.to(tl.int64) * stride_returned + column, mask=mask, other=0.0, cache_modifier=".cg"
        )
        total += values.to(tl.float32)
    total = tl.where(missing > 0, float("nan"), total)
    tl.store(output + token * stride_output + column, downcast(total, output.dtype.element_ty), mask=column < columns)
