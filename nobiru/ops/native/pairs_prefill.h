/* Attention of several tokens per sequence by products of pairs, for kernels.c, which includes this. A task is that of
 * PREFILL there; both products are of bfloat16 values, sums are float32.
 */

struct paired {
    bf16 *q, *weights;      /* [padded, size], [padded, PIECE] */
    uint32_t *keys, *values; /* in pairs: [size / 2, PIECE] of values of a key, [PIECE / 2, size] of tokens */
    float *scores, *mixed, *highest, *sums;
};

/* c [rows, columns] = a [rows, depth] @ b, or is added to; rows and columns in 32s, a row of b holds `b_stride` pairs. */
static void multiply_all(const bf16 *a, long a_stride, const uint32_t *b, long b_stride, long depth, float *c, long c_stride,
                         long rows, long columns, int adds) {
    for (long row = 0; row < rows; row += 32)
        for (long column = 0; column < columns; column += 32) {
            struct factors f = {a + row * a_stride, b + column, b + column + 16, 2 * a_stride, 64, 4 * b_stride, 64 * b_stride,
                                depth / 32, 4 * c_stride, 32, c + row * c_stride + column, adds};
            multiply_by(tiles_allowed, &f);
        }
}

/* The piece's keys and values in pairs. Of tokens behind its last one keys do not matter and values are zeros, since a
 * weight of zero would not hide what is not a number. */
static void pair_up(const struct prefill *a, const struct paired *t, const struct piece *piece, long key_head) {
    const long size = a->size, row = a->key_heads * size;
    const bf16 *keys = (const bf16 *)a->keys + key_head * size, *values = (const bf16 *)a->values + key_head * size;
    for (int first = 0; first < piece->count; first += 16) {
        const bf16 *from = keys + piece->slots[first] * row;
        for (long i = 0; i < size; i += 32) {
            __m512i rows[16];
            UNROLL for (int r = 0; r < 16; r++) rows[r] = _mm512_loadu_si512(from + r * row + i);
            turn_square(rows);
            UNROLL for (int r = 0; r < 16; r++) _mm512_store_si512(t->keys + (i / 2 + r) * PIECE + first, rows[r]);
        }
    }
    for (int token = 0; token < PIECE; token += 2) {
        uint32_t *to = t->values + token / 2 * size;
        if (token >= piece->count) {
            memset(to, 0, size * sizeof(uint32_t));
            continue;
        }
        const bf16 *even = values + piece->slots[token] * row;
        const int is_pair = token + 1 < piece->count;
        const bf16 *odd = is_pair ? values + piece->slots[token + 1] * row : even;
        for (long i = 0; i < size; i += 16) {
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + i)));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + i)));
            _mm512_store_si512(to + i, is_pair ? _mm512_or_si512(low, _mm512_slli_epi32(high, 16)) : low);
        }
    }
}

/* Scores of a row become weights; it sees the piece's tokens from `first` to before `seen`. */
static void weigh_paired_row(const struct paired *t, long r, long first, long seen, float scale, long size) {
    bf16 *weights = t->weights + r * PIECE;
    const float *scores = t->scores + r * PIECE;
    if (first < 0) first = 0;
    if (seen > PIECE) seen = PIECE;
    if (seen <= first) {
        memset(weights, 0, PIECE * sizeof(bf16));
        return;
    }
    uint64_t visible = (seen == 64 ? ~0ull : (1ull << seen) - 1) & ~((1ull << first) - 1);
    vec found[PIECE / LANES], tops = splat(t->highest[r]), added = {0};
    UNROLL for (int i = 0; i < PIECE / LANES; i++) {
        __m512 scaled = _mm512_load_ps(scores + i * LANES) * splat(scale);
        found[i] = (vec)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), (__mmask16)(visible >> (i * LANES)), scaled);
        tops = larger(tops, found[i]);
    }
    float top = largest(tops), shrink = expf(t->highest[r] - top);
    UNROLL for (int i = 0; i < PIECE / LANES; i++) added += found[i] = (vec)weight_of((__m512)(found[i] - top));
    UNROLL for (int i = 0; i < PIECE / LANES; i += 2)
        _mm512_store_si512(weights + i * LANES, (__m512i)_mm512_cvtne2ps_pbh((__m512)found[i + 1], (__m512)found[i]));
    t->highest[r] = top, t->sums[r] = t->sums[r] * shrink + total(added);
    float *mixed = t->mixed + r * size;
    if (shrink != 1.0f)
        for (long i = 0; i < size; i += LANES) store_f32(mixed + i, load_f32(mixed + i) * shrink);
}

static void prefill_pairs_task(void *arguments, long task) {
    struct prefill *a = arguments;
    const struct tile tile = a->tiles[task / a->key_heads];
    const long key_head = task % a->key_heads, per_key = a->heads / a->key_heads, size = a->size;
    const long rows = tile.count * per_key, padded = (rows + 31) / 32 * 32;
    const int32_t *table = a->block_table + tile.table_row * a->table_width;
    /* In floats; everything begins at 64 bytes, as its sizes are multiples of them. */
    float *memory = room(padded * (size / 2 + PIECE / 2 + PIECE + size + 2) + size * PIECE + 16);
    if (!memory) {
        a->failed = 1;
        return;
    }
    memory = (float *)(((uintptr_t)memory + 63) & ~(uintptr_t)63);
    struct paired t;
    t.q = (bf16 *)memory, t.weights = t.q + padded * size, t.keys = (uint32_t *)(t.weights + padded * PIECE);
    t.values = t.keys + size / 2 * PIECE, t.scores = (float *)(t.values + PIECE / 2 * size);
    t.mixed = t.scores + padded * PIECE, t.highest = t.mixed + padded * size, t.sums = t.highest + padded;
    memset(t.q, 0, padded * (size + PIECE) * sizeof(bf16));
    memset(t.mixed, 0, padded * size * sizeof(float));
    for (long r = 0; r < rows; r++) {
        long token = tile.token + r / per_key, head = key_head * per_key + r % per_key;
        memcpy(t.q + r * size, (const bf16 *)a->q + token * a->q_stride + head * size, size * sizeof(bf16));
        t.highest[r] = -INFINITY, t.sums[r] = 0;
    }
    begin_pairs(tiles_allowed);
    long context = tile.position + tile.count;
    long start = a->window && tile.position >= a->window ? tile.position - a->window + 1 : 0;
    for (start -= start % 16; start < context; start += PIECE) {
        struct piece piece;
        find_piece(&piece, PIECE, a->block_size, table, start, context);
        pair_up(a, &t, &piece, key_head);
        multiply_all(t.q, size, t.keys, PIECE, size, t.scores, PIECE, padded, (piece.count + 31) / 32 * 32, 0);
        for (long r = 0; r < rows; r++) {
            long place = tile.position + r / per_key - start; /* of the row's token, in the piece */
            weigh_paired_row(&t, r, a->window ? place - a->window + 1 : 0, place + 1, a->scale, size);
        }
        multiply_all(t.weights, PIECE, t.values, size, (piece.count + 31) / 32 * 32, t.mixed, size, padded, size, 1);
    }
    end_pairs(tiles_allowed);
    for (long r = 0; r < rows; r++) {
        long token = tile.token + r / per_key, head = key_head * per_key + r % per_key;
        bf16 *target = (bf16 *)a->out + (token * a->heads + head) * size;
        for (long i = 0; i < size; i += LANES) store_bf16(target + i, load_f32(t.mixed + r * size + i) / t.sums[r]);
    }
}

/* The task above, where keys lie as it needs them; else none. */
static void (*task_of_pairs(const struct prefill *a))(void *, long) {
    return !(a->softcap > 0) && a->size % 32 == 0 && a->block_size % 16 == 0 ? prefill_pairs_task : 0;
}
