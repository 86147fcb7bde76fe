/* Attention of an encoder: every token of a sequence sees all of it. kernels.c includes this.
 *
 * A task is one head of one sequence. Its keys and values are arranged once as second factors of small products, then a
 * few queries at a time get all their scores, softmax, and the mixture of values. With bfloat16 values the products
 * take pairs: by matrix tiles (AMX) where the processor has them, else by vectors, in the same arrangement. With float32
 * they are those of `multiply`.
 *
 * Nothing is read beyond a sequence's own tokens. Scores are kept within float32's range, so finite values never make
 * a not-a-number.
 */

/* The thread's memory, on a cache line; it grows, and what it held is lost when it does. `which` tells several apart. */
static void *space(int which, long bytes) {
    static _Thread_local void *memory[4];
    static _Thread_local long sizes[4];
    if (bytes > sizes[which]) {
        free(memory[which]);
        sizes[which] = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        memory[which] = aligned_alloc(64, (size_t)sizes[which]);
        if (!memory[which]) sizes[which] = 0;
    }
    return memory[which];
}
#define SPACE_OF_RUN 0 /* queries, keys and values of a run of sequences, and what attention gave */
#define SPACE_OF_PART 1
#define SPACE_OF_ROUTES 2 /* rows on their way to a layer's experts and back */
#define SPACE_OF_EXPERTS 3 /* what experts have between their two products */

INLINE long up_to(long value, long multiple) { return (value + multiple - 1) / multiple * multiple; }

/* ---- one head of one sequence ---------------------------------------------------------------------------------------*/

struct heads {
    const void *q, *keys, *values; /* of the first token; `stride` values from token to token, a head's `size` together */
    void *out;                     /* [tokens, out_stride] */
    const float *bias;             /* [heads, bias_rows, bias_stride], added to scores; or 0 */
    const int64_t *starts;         /* [sequences + 1]: first tokens, and the end */
    long sequences, heads, size, stride, out_stride, bias_rows, bias_stride;
    float scale;
    int is_half, uses_tiles, threads, failed;
};

#define QUERIES 32
#define LOWEST (-3.4028235e38f)

/* Scores of one query, times `scale`, become weights, in their place; returns one over their sum. `length` is a whole
 * number of vectors, and scores of keys that are not there are LOWEST. Infinite ones count as the largest there are, since
 * the difference of two infinite ones is no number. */
static float soften_f32(float *scores, long length, float scale) {
    const vec high = splat(-LOWEST);
    vec tops = splat(LOWEST), added = {0};
    for (long t = 0; t < length; t += LANES) tops = larger(tops, smaller(high, load_f32(scores + t)));
    const float top = largest(tops);
    for (long t = 0; t < length; t += LANES) {
        /* Differences first: those of large products would be those of their roundings. */
        vec weights = power_of_e((smaller(high, load_f32(scores + t)) - top) * scale);
        store_f32(scores + t, weights);
        added += weights;
    }
    return 1.0f / total(added);
}

/* The scores of keys that are not there, and, with a bias, scores = scores * scale + bias; by what they are to be multiplied
 * still. */
static float complete_scores(float *scores, const float *bias, long length, long padded, float scale) {
    long t = 0;
    for (; bias && t + LANES <= length; t += LANES)
        store_f32(scores + t, load_f32(scores + t) * scale + load_f32(bias + t));
    for (; bias && t < length; t++) scores[t] = scores[t] * scale + bias[t];
    for (t = length; t < padded; t++) scores[t] = LOWEST;
    return bias ? 1.0f : scale;
}

/* c = a @ b for ROW_BLOCK rows and one or two vectors of columns. */
INLINE void multiply_few(const int vectors, const float *a, long a_stride, const float *b, long b_stride, long depth,
                         float *c, long c_stride) {
    vec sums[ROW_BLOCK][2];
    UNROLL for (int r = 0; r < ROW_BLOCK; r++) sums[r][0] = sums[r][1] = (vec){0};
    for (long k = 0; k < depth; k++, b += b_stride) {
        vec left = load_f32(b), right = vectors == 2 ? load_f32(b + LANES) : left;
        UNROLL for (int r = 0; r < ROW_BLOCK; r++) {
            vec value = splat(a[r * a_stride + k]);
            sums[r][0] += value * left;
            if (vectors == 2) sums[r][1] += value * right;
        }
    }
    UNROLL for (int r = 0; r < ROW_BLOCK; r++) {
        store_f32(c + r * c_stride, sums[r][0]);
        if (vectors == 2) store_f32(c + r * c_stride + LANES, sums[r][1]);
    }
}

static void multiply_floats(const float *a, long a_stride, const float *b, long b_stride, long depth, float *c,
                            long c_stride, int rows, long columns) {
    for (int r = 0; r < rows; r += ROW_BLOCK)
        for (long i = 0; i < columns; i += 2 * LANES) {
            const float *own_a = a + r * a_stride;
            float *own_c = c + r * c_stride + i;
            if (i + LANES < columns) multiply_few(2, own_a, a_stride, b + i, b_stride, depth, own_c, c_stride);
            else multiply_few(1, own_a, a_stride, b + i, b_stride, depth, own_c, c_stride);
        }
}

/* Queries query, query + 1, … of a head as whole rows of `width` values; rows and columns that are not there are 0. */
static void copy_queries(char *to, const char *from, long stride, int rows, int whole, long size, long width) {
    for (int r = 0; r < whole; r++) {
        long copied = r < rows ? size : 0;
        memcpy(to + r * width, from + r * stride, (size_t)copied);
        memset(to + r * width + copied, 0, (size_t)(width - copied));
    }
}

/* Keys turned around, [size, padded]: for each of a key's values those of all keys; 0 behind the last key. */
static void turn_keys(float *turned, const float *keys, long stride, long length, long padded, long size) {
    for (long t = 0; t < padded; t += LANES)
        for (long i = 0; i < size; i += LANES) {
#ifdef __AVX512F__
            __m512i rows[LANES];
            UNROLL for (int r = 0; r < LANES; r++)
                rows[r] = t + r < length ? _mm512_loadu_si512(keys + (t + r) * stride + i) : _mm512_setzero_si512();
            turn_square(rows);
            UNROLL for (int r = 0; r < LANES; r++) _mm512_storeu_si512(turned + (i + r) * padded + t, rows[r]);
#else
            for (int r = 0; r < LANES; r++)
                for (long k = t; k < t + LANES; k++) turned[(i + r) * padded + k] = k < length ? keys[k * stride + i + r] : 0;
#endif
        }
}

static int attend_head_f32(const struct heads *a, long start, long length, long head) {
    const long size = a->size, padded = up_to(length, LANES);
    float *memory = space(SPACE_OF_PART, 4 * (size * (padded + length) + QUERIES * (padded + 2 * size)));
    if (!memory) return 1;
    float *turned = memory, *values = turned + size * padded, *scores = values + size * length;
    float *q = scores + QUERIES * padded, *mixed = q + QUERIES * size;
    const long first = start * a->stride + head * size;
    const float *own_q = (const float *)a->q + first, *own_keys = (const float *)a->keys + first;
    const float *own_values = (const float *)a->values + first;
    turn_keys(turned, own_keys, a->stride, length, padded, size);
    /* Together, since rows that are far apart may all fall on the same few places of a cache. */
    for (long t = 0; t < length; t++) memcpy(values + t * size, own_values + t * a->stride, (size_t)size * sizeof(float));
    for (long query = 0; query < length; query += QUERIES) {
        const int rows = length - query < QUERIES ? (int)(length - query) : QUERIES;
        const int whole = (int)up_to(rows, ROW_BLOCK);
        float shrink[QUERIES];
        copy_queries((char *)q, (const char *)(own_q + query * a->stride), 4 * a->stride, rows, whole, 4 * size, 4 * size);
        multiply_floats(q, size, turned, padded, size, scores, padded, whole, padded);
        for (int r = 0; r < rows; r++) {
            const float *bias = a->bias ? a->bias + (head * a->bias_rows + query + r) * a->bias_stride : 0;
            const float scale = complete_scores(scores + r * padded, bias, length, padded, a->scale);
            shrink[r] = soften_f32(scores + r * padded, padded, scale);
        }
        multiply_floats(scores, padded, values, size, length, mixed, size, whole, size);
        for (int r = 0; r < rows; r++) {
            float *target = (float *)a->out + (start + query + r) * a->out_stride + head * size;
            for (long i = 0; i < size; i += LANES) store_f32(target + i, load_f32(mixed + r * size + i) * shrink[r]);
        }
    }
    return 0;
}

#ifdef __AVX512BF16__
/* Keys as tiles [padded / 16][width / 32] of 16 pairs of their values by 16 keys. */
static void arrange_keys(char *tiles, const bf16 *keys, long stride, long length, long padded, long size, long width) {
    for (long key = 0; key < padded; key += 16)
        for (long i = 0; i < width; i += 32, tiles += 1024) {
            __mmask32 there = size - i < 32 ? (__mmask32)((1u << (size - i)) - 1) : (__mmask32)-1;
            __m512i rows[16];
            UNROLL for (int r = 0; r < 16; r++)
                rows[r] = key + r < length ? _mm512_maskz_loadu_epi16(there, keys + (key + r) * stride + i)
                                           : _mm512_setzero_si512();
            turn_square(rows);
            UNROLL for (int r = 0; r < 16; r++) _mm512_store_si512(tiles + 64 * r, rows[r]);
        }
}

/* Values as tiles [size / 16][padded / 32] of 16 pairs of keys by 16 of their values. */
static void arrange_values(char *tiles, const bf16 *values, long stride, long length, long padded, long size) {
    for (long i = 0; i < size; i += 16)
        for (long key = 0; key < padded; key += 2, tiles += 64) {
            __m512i even = _mm512_setzero_si512(), odd = even;
            const bf16 *from = values + key * stride + i;
            if (key < length) even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
            if (key + 1 < length) odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + stride)));
            _mm512_store_si512(tiles, _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

/* As soften_f32, to weights in bfloat16. */
static float soften_bf16(const float *scores, bf16 *weights, long length, float scale) {
    const __m512 low = _mm512_set1_ps(LOWEST), high = _mm512_set1_ps(-LOWEST);
    __m512 tops = low, added = _mm512_setzero_ps();
    for (long t = 0; t < length; t += 16) tops = _mm512_max_ps(tops, _mm512_loadu_ps(scores + t));
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(_mm512_min_ps(tops, high))), factor = _mm512_set1_ps(scale);
    for (long t = 0; t < length; t += 16) {
        __m512 x = _mm512_min_ps(_mm512_loadu_ps(scores + t), high);
        __m512 y = weight_of(_mm512_mul_ps(_mm512_sub_ps(x, top), factor));
        added = _mm512_add_ps(added, y);
        _mm256_storeu_si256((__m256i *)(weights + t), (__m256i)_mm512_cvtneps_pbh(y));
    }
    return 1.0f / _mm512_reduce_add_ps(added);
}

/* c [rows, 16 * columns] = a @ b, of `steps` tiles in each of b's columns, which follow each other. */
static void multiply_columns(int uses_tiles, const void *a, long a_stride, int rows, const char *b, long steps,
                             long columns, float *c, long c_stride) {
    for (long i = 0; i < columns; i += 2) {
        const char *left = b + i * steps * 1024;
        struct factors f = {a, left, i + 1 < columns ? left + steps * 1024 : 0, a_stride, 64, 64, 1024, steps, 4 * c_stride,
                            rows, c + 16 * i};
        multiply_by(uses_tiles, &f);
    }
}

static int attend_head_bf16(const struct heads *a, long start, long length, long head) {
    const long size = a->size, width = up_to(size, 32), padded = up_to(length, 32);
    const long of_keys = 2 * padded * width, of_values = 2 * padded * size, of_scores = 4 * QUERIES * padded;
    char *memory = space(SPACE_OF_PART, of_keys + of_values + of_scores * 3 / 2 + QUERIES * (2 * width + 4 * size));
    if (!memory) return 1;
    char *keys = memory, *values = keys + of_keys;
    float *scores = (float *)(values + of_values), *mixed = scores + QUERIES * padded;
    bf16 *weights = (bf16 *)(mixed + QUERIES * size), *q = weights + QUERIES * padded;
    const long first = start * a->stride + head * size;
    const bf16 *own_q = (const bf16 *)a->q + first;
    arrange_keys(keys, (const bf16 *)a->keys + first, a->stride, length, padded, size, width);
    arrange_values(values, (const bf16 *)a->values + first, a->stride, length, padded, size);
    for (long query = 0; query < length; query += QUERIES) {
        const int rows = length - query < QUERIES ? (int)(length - query) : QUERIES, whole = (int)up_to(rows, 16);
        float shrink[QUERIES];
        copy_queries((char *)q, (const char *)(own_q + query * a->stride), 2 * a->stride, rows, whole, 2 * size, 2 * width);
        multiply_columns(a->uses_tiles, q, 2 * width, whole, keys, width / 32, padded / 16, scores, padded);
        for (int r = 0; r < rows; r++) {
            const float *bias = a->bias ? a->bias + (head * a->bias_rows + query + r) * a->bias_stride : 0;
            const float scale = complete_scores(scores + r * padded, bias, length, padded, a->scale);
            shrink[r] = soften_bf16(scores + r * padded, weights + r * padded, padded, scale);
        }
        multiply_columns(a->uses_tiles, weights, 2 * padded, whole, values, padded / 32, size / 16, mixed, size);
        for (int r = 0; r < rows; r++) {
            bf16 *target = (bf16 *)a->out + (start + query + r) * a->out_stride + head * size;
            for (long i = 0; i < size; i += 16) {
                __m512 x = _mm512_mul_ps(_mm512_loadu_ps(mixed + r * size + i), _mm512_set1_ps(shrink[r]));
                _mm256_storeu_si256((__m256i *)(target + i), (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
    }
    return 0;
}
#endif

static int attend_head(const struct heads *a, long sequence, long head) {
    const long start = a->starts[sequence], length = a->starts[sequence + 1] - start;
#ifdef __AVX512BF16__
    if (a->is_half) return attend_head_bf16(a, start, length, head);
#endif
    return attend_head_f32(a, start, length, head);
}

static void attend_packed_task(void *arguments, long task) {
    struct heads *a = arguments;
    long part = task;
    begin_pairs(a->uses_tiles);
    if (attend_head(a, part / a->heads, part % a->heads)) a->failed = 1;
    end_pairs(a->uses_tiles);
}

void attend_packed(struct heads *a) { in_parallel(attend_packed_task, a, a->sequences * a->heads, a->threads); }

/* What this library was made for, as bits: 1 pairs of bfloat16, 2 tiles, 4 products of bytes, 8 of bytes with small weights. */
int32_t encoder_instructions(void) {
    int32_t found = 0;
#ifdef __AVX512BF16__
    found |= 1;
#endif
#ifdef HAS_TILES
    found |= 2;
#endif
#ifdef __AVX512VNNI__
    found |= 4;
#endif
#ifdef HAS_SMALL_BYTES
    found |= 8;
#endif
    return found;
}
