"""Triton kernels of a decoding pass: what a layer computes for a few tokens, where no kept library has it in one piece.

Each docstring has what the kernel computes, and why it is our own. Sums are made in float32, and a result is rounded
once. Lengths, places and trees are read on the device, so that no launch depends on them. With `TRITON_INTERPRET=1` in
the environment before `triton` is imported, all of them run on a CPU, slowly: tests do that.

Shapes: M tokens of all rows (B·Q), B rows, Q tokens per row, C numbers of an input, N outputs, D head size, P parts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiply_vector(
    x,  # [M, C]
    weight,  # [N, C], or gates and then ups, [2N, C]
    norm,  # [C]
    bias,  # [N]
    out,  # [M, N]
    num_out,
    eps,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Multiply one token by a matrix that is read once: RMSNorm before, SiLU(gate)·up or an addition after.

    A norm's factor is one number, so it is multiplied in at the end, and the norm costs no pass of its own. cuBLAS has
    no such norm and no gate; liger-kernel's norm and SwiGLU are kernels of their own, each as long as a launch;
    inductor makes this kernel only with coordinate-descent tuning of the whole model, for each shape of its passes.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1)
    rows = n.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_C], tl.float32)
    squares = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, WIDTH, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        inside = (n < num_out)[:, None] & (c < WIDTH)[None, :]
        value = tl.load(x + token * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        if NORMED:
            squares += value * value
            value *= tl.load(norm + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        matrix = tl.load(weight + rows + c[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        total += matrix.to(tl.float32) * value[None, :]
        if GATED:
            lower = weight + num_out.to(tl.int64) * WIDTH
            matrix = tl.load(lower + rows + c[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            up += matrix.to(tl.float32) * value[None, :]
    found = tl.sum(total, 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        found *= scale
    if BIASED:
        found += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)
    if GATED:
        found = found * tl.sigmoid(found) * (tl.sum(up, 1) * scale)
    place = out + token * num_out + n
    if ADDED:
        found += tl.load(place, mask=n < num_out, other=0.0).to(tl.float32)
    tl.store(place, found.to(out.dtype.element_ty), mask=n < num_out)


@triton.jit
def multiply_tokens(
    x,  # [M, C]
    weight,  # [N, C], or gates and then ups, [2N, C]
    norm,  # [C]
    bias,  # [N]
    out,  # [M, N]
    num_tokens,
    num_out,
    eps,
    WIDTH: tl.constexpr,
    NORMED: tl.constexpr,
    BIASED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Multiply a few tokens by a matrix that is read once, on tensor cores: what `multiply_vector` does for one.

    The matrix is on the left, so that sixteen of its rows fill a tensor core however few tokens there are. cuBLAS
    is tried against it for every shape, and has neither the norm nor the gate; so with it a layer takes three more
    launches.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = n.to(tl.int64)[:, None] * WIDTH
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, WIDTH, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        inside = (n < num_out)[:, None] & (c < WIDTH)[None, :]
        there = (c < WIDTH)[:, None] & (m < num_tokens)[None, :]
        value = tl.load(x + m[None, :] * WIDTH + c[:, None], mask=there, other=0.0)
        if NORMED:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            factors = tl.load(norm + c, mask=c < WIDTH, other=0.0).to(tl.float32)
            value = (wide * factors[:, None]).to(value.dtype)
        matrix = tl.load(weight + rows + c[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
        total = tl.dot(matrix, value, total, input_precision="ieee")
        if GATED:
            lower = weight + num_out.to(tl.int64) * WIDTH
            matrix = tl.load(lower + rows + c[None, :], mask=inside, other=0.0, eviction_policy="evict_first")
            up = tl.dot(matrix, value, up, input_precision="ieee")
    if NORMED:
        scale = tl.rsqrt(squares / WIDTH + eps)
        total *= scale[None, :]
        up *= scale[None, :]
    if BIASED:
        total += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[:, None]
    if GATED:
        total = total * tl.sigmoid(total) * up
    place = out + m[None, :] * num_out + n[:, None]
    inside = (n < num_out)[:, None] & (m < num_tokens)[None, :]
    if ADDED:
        total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate(
    both,  # [M, 2N]
    out,  # [M, N]
    num_out,
    BLOCK_N: tl.constexpr,
):
    """Multiply SiLU of a token's gates by its ups, which one product gave side by side.

    It serves where cuBLAS multiplies. liger-kernel's SwiGLU takes gates and ups as tensors of their own, and keeps
    what a backward pass needs; torch has no such operation, and would launch two.
    """
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = both + token * 2 * num_out
    left = tl.load(row + n, mask=n < num_out, other=0.0).to(tl.float32)
    right = tl.load(row + num_out + n, mask=n < num_out, other=0.0).to(tl.float32)
    tl.store(out + token * num_out + n, (left * tl.sigmoid(left) * right).to(out.dtype.element_ty), mask=n < num_out)


@triton.jit
def place_heads(
    joined,  # [M, heads + 2 kv_heads, D]
    query_norm,  # [D]
    key_norm,  # [D]
    frequencies,  # [D / 2]
    positions,  # [B, Q]
    slots,  # [B, Q]
    query,  # [M, heads, D]
    keys,  # [B, kv_heads, L, D]
    values,  # [B, kv_heads, L, D]
    positions_row,
    positions_token,
    slots_row,
    slots_token,
    keys_row,
    keys_head,
    values_row,
    values_head,
    num_queries,
    eps,
    scaling,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Turn queries and keys by their positions' angles, after norms of their own if they have such, and store entries.

    One launch instead of torch's ten, or sixteen with norms. FlashInfer fuses turning and storing for pages of its own
    layout, without the norms; liger-kernel turns, and neither norms nor stores. Angles are made here of the model's
    own frequencies and rounded as the library rounds them: no table, and no launch for one.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, number = token // num_queries, token % num_queries
    d = tl.arange(0, SIZE)
    partner = (d + SIZE // 2) % SIZE
    source = joined + (token * (HEADS + 2 * KV_HEADS) + head).to(tl.int64) * SIZE
    value = tl.load(source + d).to(tl.float32)
    if head < HEADS + KV_HEADS:
        other = tl.load(source + partner).to(tl.float32)
        if NORMED:
            scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
            if head < HEADS:
                value *= scale * tl.load(query_norm + d).to(tl.float32)
                other *= scale * tl.load(query_norm + partner).to(tl.float32)
            else:
                value *= scale * tl.load(key_norm + d).to(tl.float32)
                other *= scale * tl.load(key_norm + partner).to(tl.float32)
        place = tl.load(positions + row * positions_row + number * positions_token).to(tl.float32)
        angle = place * tl.load(frequencies + d % (SIZE // 2)).to(tl.float32)
        cosine = (tl.cos(angle) * scaling).to(joined.dtype.element_ty).to(tl.float32)
        sine = (tl.sin(angle) * scaling).to(joined.dtype.element_ty).to(tl.float32)
        value = value * cosine + tl.where(d < SIZE // 2, -other, other) * sine
    found = value.to(query.dtype.element_ty)
    slot = tl.load(slots + row * slots_row + number * slots_token)
    if head < HEADS:
        tl.store(query + (token * HEADS + head).to(tl.int64) * SIZE + d, found)
    elif head < HEADS + KV_HEADS:
        tl.store(keys + row.to(tl.int64) * keys_row + (head - HEADS).to(tl.int64) * keys_head + slot * SIZE + d, found)
    else:
        own = (head - HEADS - KV_HEADS).to(tl.int64)
        tl.store(values + row.to(tl.int64) * values_row + own * values_head + slot * SIZE + d, found)


@triton.jit
def attend_parts(
    query,  # [M, heads, D]
    keys,  # [B, kv_heads, L, D]
    values,  # [B, kv_heads, L, D]
    lengths,  # [B]
    slots,  # [B, Q]
    positions,  # [B, Q]
    sees,  # [B, Q, E], of a tree's E uncommitted entries
    depths,  # [B, E]
    mixed,  # [B, kv_heads, P, group · Q, D] in float32
    sums,  # [B, kv_heads, P, group · Q] in float32
    out,  # [M, heads, D]
    keys_row,
    keys_head,
    values_row,
    values_head,
    slots_row,
    slots_token,
    positions_row,
    positions_token,
    sees_row,
    sees_token,
    depths_row,
    num_queries,
    num_entries,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Attend within one of P parts of a row's entries (flash-decoding); heads that share keys are so many more queries.

    A row's length, its tokens' slots and its tree are read on the device, so one graph serves all lengths, and no mask
    as long as the text is made. FlashInfer plans every batch on the host, compiles just in time, and takes trees as
    packed masks of whole lengths; FlexAttention's decoding kernel takes a block mask that is made anew each round;
    torch's SDPA has no lengths of rows and reads a mask of `[Q, L]`.
    """
    row, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < GROUP * num_queries
    token = m % num_queries
    head = kv_head * GROUP + m // num_queries
    d = tl.arange(0, SIZE)
    places = ((row * num_queries + token) * KV_HEADS * GROUP + head).to(tl.int64)[:, None] * SIZE + d[None, :]
    asked = tl.load(query + places, mask=live[:, None], other=0.0)
    own = tl.load(slots + row * slots_row + token * slots_token, mask=live, other=0)
    length = tl.load(lengths + row)
    end = tl.load(slots + row * slots_row + (num_queries - 1) * slots_token) + 1
    begin = length * 0  # a zero of the type that `tl.maximum` gives it below
    if WINDOW:
        position = tl.load(positions + row * positions_row + token * positions_token, mask=live, other=0)
        begin = tl.maximum(length - WINDOW, 0)
    each = tl.cdiv(tl.cdiv(end - begin, BLOCK_L), PARTS) * BLOCK_L
    first = begin + part * each
    last = tl.minimum(first + each, end)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_M], tl.float32)
    gathered = tl.zeros([BLOCK_M, SIZE], tl.float32)
    keys += row.to(tl.int64) * keys_row + kv_head.to(tl.int64) * keys_head
    values += row.to(tl.int64) * values_row + kv_head.to(tl.int64) * values_head
    for start in range(first, last, BLOCK_L):
        slot = start + tl.arange(0, BLOCK_L)
        there = slot < last
        key = tl.load(keys + slot[None, :] * SIZE + d[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(asked, key, input_precision="ieee") * (scale * 1.4426950408889634)
        place = slot
        if TREE:
            entry = (slot - length).to(tl.int32)
            known = (entry >= 0) & (entry < num_entries)
            look = sees + row * sees_row + (token[:, None] * sees_token + entry[None, :])
            seen = tl.load(look, mask=known[None, :] & live[:, None], other=0) != 0
            seen = there[None, :] & (seen | (entry < 0)[None, :])
            if WINDOW:
                depth = tl.load(depths + row * depths_row + entry, mask=known, other=0)
                place = tl.where(entry < 0, slot, length + depth)
        else:
            seen = there[None, :] & (slot[None, :] <= own[:, None])
        if WINDOW:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        value = tl.load(values + slot[:, None] * SIZE + d[None, :], mask=there[:, None], other=0.0)
        weights = weights * fade + tl.sum(weight, 1)
        gathered = gathered * fade[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = higher
    gathered = gathered / tl.where(weights == 0.0, 1.0, weights)[:, None]
    if PARTS == 1:
        tl.store(out + places, gathered.to(out.dtype.element_ty), mask=live[:, None])
    else:
        # A part in which nothing is seen weighs nothing: its logarithm is -inf, not 0.
        total = tl.where(weights == 0.0, float("-inf"), top + tl.log2(tl.where(weights == 0.0, 1.0, weights)))
        spot = ((tl.program_id(0) * PARTS + part) * GROUP * num_queries + m).to(tl.int64)
        tl.store(sums + spot, total, mask=live)
        tl.store(mixed + spot[:, None] * SIZE + d[None, :], gathered, mask=live[:, None])


@triton.jit
def merge_parts(
    mixed,  # [B, kv_heads, P, group · Q, D] in float32
    sums,  # [B, kv_heads, P, group · Q] in float32
    out,  # [M, heads, D]
    num_queries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge what `attend_parts` gathered in each part, by the weight of the part.

    Torch would launch five kernels for it; FlashInfer's merge is of pairs of states, and comes with its attention.
    """
    token, head = tl.program_id(0), tl.program_id(1)
    row, number = token // num_queries, token % num_queries
    m = (head % GROUP) * num_queries + number
    part = tl.arange(0, PARTS)
    d = tl.arange(0, SIZE)
    spot = (((row * KV_HEADS + head // GROUP) * PARTS + part) * GROUP * num_queries + m).to(tl.int64)
    total = tl.load(sums + spot)
    weight = tl.exp2(total - tl.max(total, 0))  # every token sees itself: some part is alive
    weight = weight / tl.sum(weight, 0)
    gathered = tl.load(mixed + spot[:, None] * SIZE + d[None, :])
    # A dead part's numbers are finite: they were divided by 1 instead of 0.
    found = tl.sum(gathered * weight[:, None], 0)
    tl.store(out + (token * KV_HEADS * GROUP + head).to(tl.int64) * SIZE + d, found.to(out.dtype.element_ty))
