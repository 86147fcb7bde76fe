/* What a decoder does on a CPU, token by token: products with weight matrices, attention of one token per sequence over
 * a KV cache in blocks, and what happens to rows in between. Compiled on the machine that runs it; see library.py.
 *
 * Vectors are GCC's vector extensions, so that one source serves every instruction set; only products of pairs of
 * bfloat16 values and of bytes are intrinsics. Threads are those of parallel.h, as many as the caller says.
 * Memory is that of torch tensors; nothing is checked here: callers do.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "parallel.h"

#ifdef __AVX512F__
#define LANES 16
#define MAX_ROWS 12
#else
#define LANES 8
#define MAX_ROWS 6
#endif
#define WIDTH (2 * LANES) /* outputs of a panel */
#if defined(__AVX512BW__) || (defined(__AVX2__) && LANES == 8)
#define HAS_SMALL_BYTES /* products of bytes in vectors of LANES sums */
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));
typedef float vec_u __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t hvec_u __attribute__((vector_size(LANES * 2), aligned(2)));

/* Orders of lanes: halves, quarters, pairs and neighbours exchanged; the even, or the odd one, of each pair. */
#define SHUFFLE(x, order) __builtin_shuffle(x, (ivec)order)
#if LANES == 16
#define HALVES {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}
#define QUARTERS {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}
#define DOUBLES {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}
#define SWAPPED {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}
#define EVENS {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14}
#define ODDS {1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15}
#define SIGNS (vec){-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1}
#else
#define QUARTERS {4, 5, 6, 7, 0, 1, 2, 3}
#define DOUBLES {2, 3, 0, 1, 6, 7, 4, 5}
#define SWAPPED {1, 0, 3, 2, 5, 4, 7, 6}
#define EVENS {0, 0, 2, 2, 4, 4, 6, 6}
#define ODDS {1, 1, 3, 3, 5, 5, 7, 7}
#define SIGNS (vec){-1, 1, -1, 1, -1, 1, -1, 1}
#endif

INLINE vec load_f32(const float *p) { return *(const vec_u *)p; }
INLINE void store_f32(float *p, vec x) { *(vec_u *)p = x; }
INLINE vec load_bf16(const bf16 *p) { return (vec)(__builtin_convertvector(*(const hvec_u *)p, ivec) << 16); }
/* Round to nearest, ties to even; not-a-number stays one. */
INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void store_bf16(bf16 *p, vec x) {
    ivec bits = (ivec)x;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    ivec is_nan = (ivec)(x != x);
    *(hvec_u *)p = __builtin_convertvector((bits & ~is_nan) | (0x7fc0 & is_nan), hvec);
}
INLINE void set_f32(float *p, float x) { *p = x; }
INLINE void set_bf16(bf16 *p, float x) { *p = to_bf16(x); }
INLINE vec splat(float x) { return x - (vec){0}; }
INLINE float total(vec x) {
#if LANES == 16
    x += SHUFFLE(x, HALVES);
#endif
    x += SHUFFLE(x, QUARTERS);
    x += SHUFFLE(x, DOUBLES);
    x += SHUFFLE(x, SWAPPED);
    return x[0];
}
INLINE vec either(ivec first, vec x, vec y) { return (vec)(((ivec)x & first) | ((ivec)y & ~first)); }
/* y where it is larger, or smaller, else x: also where one is not a number. */
#if defined(__AVX512F__)
INLINE vec larger(vec x, vec y) { return (vec)_mm512_max_ps((__m512)y, (__m512)x); }
INLINE vec smaller(vec x, vec y) { return (vec)_mm512_min_ps((__m512)y, (__m512)x); }
#elif defined(__AVX2__)
INLINE vec larger(vec x, vec y) { return (vec)_mm256_max_ps((__m256)y, (__m256)x); }
INLINE vec smaller(vec x, vec y) { return (vec)_mm256_min_ps((__m256)y, (__m256)x); }
#else
INLINE vec larger(vec x, vec y) { return either((ivec)(y > x), y, x); }
INLINE vec smaller(vec x, vec y) { return either((ivec)(y < x), y, x); }
#endif
INLINE float largest(vec x) {
#if LANES == 16
    x = larger(x, SHUFFLE(x, HALVES));
#endif
    x = larger(x, SHUFFLE(x, QUARTERS));
    x = larger(x, SHUFFLE(x, DOUBLES));
    return larger(x, SHUFFLE(x, SWAPPED))[0];
}
/* e to the power of x, within 2 units in the last place; 0 below -87, infinity above 88. x = n ln 2 + r. */
INLINE vec power_of_e(vec x) {
    const vec shift = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
#ifdef __AVX512F__
    const __mmask16 is_there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    x = smaller(x, splat(90.0f));
#else
    ivec is_small = (ivec)(x < splat(-87.0f)), is_large = (ivec)(x > splat(88.0f));
#endif
    vec n = (x * 1.44269504f + shift) - shift;
    vec r = x - n * 0.693145752f - n * 1.42860677e-6f;
    vec y = splat(1.38888889e-3f);
    y = y * r + 8.33333333e-3f;
    y = y * r + 4.16666667e-2f;
    y = y * r + 1.66666667e-1f;
    y = y * r + 0.5f;
    y = (y * r + 1.0f) * r + 1.0f;
#ifdef __AVX512F__
    return (vec)_mm512_maskz_scalef_ps(is_there, (__m512)y, (__m512)n);
#else
    ivec power = __builtin_convertvector(n + 127.0f, ivec) << 23;
    return (vec)(((ivec)(y * (vec)power) & ~is_small & ~is_large) | ((ivec)splat(INFINITY) & is_large));
#endif
}

/* 1 / x within a unit or two in the last place, for finite x. */
INLINE vec one_over(vec x) {
#ifdef __AVX512F__
    vec y = (vec)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
#else
    return 1.0f / x;
#endif
}

#ifdef __AVX512F__
/* 16 rows of 16 values of 32 bits, turned around. */
static void turn_square(__m512i *x) {
    __m512i y[16];
    UNROLL for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        y[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        y[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    }
    UNROLL for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
    }
}
#endif

int32_t panel_width(void) { return WIDTH; }

int32_t multiplies_bf16_pairs(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

/* ---- y = x @ weight.T + bias ---------------------------------------------------------------------------------------
 *
 * The weight is in panels of WIDTH outputs, [panels, inputs, WIDTH]; for pairs [panels, inputs / 2, WIDTH, 2].
 * Missing outputs of the last panel are zeros. x is [rows, inputs] with `stride` values from row to row, y is
 * [rows, outputs]. A tile is up to MAX_ROWS rows by one panel, and its sums stay in registers. Meanwhile a part of the next
 * panel is fetched, as large for each of this one's tiles, so that memory is never at rest.
 */

#define PUT(NAME, T, SET)                                                                                              \
    static __attribute__((noinline)) void NAME(const float *sums, int rows, T *y, long outputs, int count,             \
                                               const float *bias) {                                                    \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int i = 0; i < count; i++)                                                                            \
                SET(y + r * outputs + i, sums[r * WIDTH + i] + (bias ? bias[i] : 0.0f));                               \
    }

PUT(put_f32, float, set_f32)
#ifdef __AVX512BF16__
PUT(put_bf16, bf16, set_bf16)
#endif

struct ahead {
    const char *next;
    long step; /* bytes for each turn of a tile's loop */
};

/* For tile number `number` of `tiles`, of the `bytes` at `next`; a turn takes `turn` bytes of the panel. */
INLINE struct ahead fetch_part(const char *next, long bytes, long number, long tiles, long turn) {
    return (struct ahead){next + number * bytes / tiles, (turn + tiles - 1) / tiles};
}
INLINE void fetch_next(struct ahead *ahead) {
    __builtin_prefetch(ahead->next, 0, 2);
    if (ahead->step > 64) __builtin_prefetch(ahead->next + 64, 0, 2);
    ahead->next += ahead->step;
}

/* Rows of a tile, walked together. Three share a pointer, since a pointer for each is more than a processor has registers
 * for; compilers would make them all the same, if they saw what the pointers are. */
struct walk {
    const char *threes[(MAX_ROWS + 2) / 3];
    long stride;
};
INLINE void begin_walk(struct walk *walk, const int rows, const void *x, long stride) {
    UNROLL for (int i = 0; i < (rows + 2) / 3; i++) walk->threes[i] = (const char *)x + 3 * i * stride;
    walk->stride = stride;
}
INLINE void step_on(struct walk *walk, const int rows, long bytes) {
    UNROLL for (int i = 0; i < (rows + 2) / 3; i++) {
        walk->threes[i] += bytes;
        __asm__("" : "+r"(walk->threes[i]));
    }
}
INLINE const char *row_of(const struct walk *walk, int row) { return walk->threes[row / 3] + row % 3 * walk->stride; }

#define TILE(NAME, WEIGHT, LOAD)                                                                                       \
    INLINE void NAME(const int rows, const WEIGHT *w, const float *x, long stride, long inputs, struct ahead ahead,    \
                     float *sums_out) {                                                                                \
        vec sums[MAX_ROWS][2];                                                                                         \
        struct walk walk;                                                                                              \
        begin_walk(&walk, rows, x, stride * (long)sizeof(float));                                                      \
        UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (vec){0};                                      \
        for (long k = 0; k < inputs; k++, w += WIDTH) {                                                                \
            vec w0 = LOAD(w), w1 = LOAD(w + LANES);                                                                    \
            fetch_next(&ahead);                                                                                        \
            UNROLL for (int r = 0; r < rows; r++) {                                                                    \
                vec value = splat(*(const float *)row_of(&walk, r));                                                   \
                sums[r][0] += value * w0;                                                                              \
                sums[r][1] += value * w1;                                                                              \
            }                                                                                                          \
            step_on(&walk, rows, sizeof(float));                                                                       \
        }                                                                                                              \
        UNROLL for (int r = 0; r < rows; r++) {                                                                        \
            store_f32(sums_out + r * WIDTH, sums[r][0]);                                                               \
            store_f32(sums_out + r * WIDTH + LANES, sums[r][1]);                                                       \
        }                                                                                                              \
    }

TILE(tile_f32, float, load_f32)
TILE(tile_bf16, bf16, load_bf16)

#ifdef __AVX512BF16__
INLINE void tile_pairs(const int rows, const bf16 *w, const bf16 *x, long stride, long inputs, struct ahead ahead,
                       float *sums_out) {
    __m512 sums[MAX_ROWS][2];
    struct walk walk;
    begin_walk(&walk, rows, x, stride * (long)sizeof(bf16));
    UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (long k = 0; k < inputs; k += 2, w += 2 * WIDTH) {
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 2 * LANES);
        fetch_next(&ahead);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, row_of(&walk, r), 4);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, value);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, value);
        }
        step_on(&walk, rows, 2 * sizeof(bf16));
    }
    UNROLL for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(sums_out + r * WIDTH, sums[r][0]);
        _mm512_storeu_ps(sums_out + r * WIDTH + LANES, sums[r][1]);
    }
}
#endif

#define CASE(TILE_NAME, N)                                                                                             \
    case N:                                                                                                            \
        TILE_NAME(N, w, x, stride, inputs, ahead, sums);                                                               \
        break;

#if MAX_ROWS == 12
#define ALL_CASES(T)                                                                                                   \
    CASE(T, 1) CASE(T, 2) CASE(T, 3) CASE(T, 4) CASE(T, 5) CASE(T, 6) CASE(T, 7) CASE(T, 8) CASE(T, 9) CASE(T, 10)     \
    CASE(T, 11) CASE(T, 12)
#else
#define ALL_CASES(T) CASE(T, 1) CASE(T, 2) CASE(T, 3) CASE(T, 4) CASE(T, 5) CASE(T, 6)
#endif

/* One panel of outputs for all rows, which are cut into equal blocks. */
#define PANEL(NAME, TILE_NAME, PUT_NAME, WEIGHT, X, Y)                                                                 \
    static void NAME(const WEIGHT *w, const float *bias, const X *all_x, long stride, Y *y, long rows, long inputs,    \
                     long outputs, int count) {                                                                        \
        long blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;                                                                \
        for (long block = 0; block < blocks; block++) {                                                                \
            long first = block * rows / blocks, last = (block + 1) * rows / blocks;                                    \
            const X *x = all_x + first * stride;                                                                       \
            const long turn = WIDTH * (long)sizeof(WEIGHT);                                                            \
            const char *next = (const char *)(w + inputs * WIDTH);                                                     \
            struct ahead ahead = fetch_part(next, inputs * turn, block, blocks, sizeof(X) == 2 ? 2 * turn : turn);     \
            float sums[MAX_ROWS * WIDTH];                                                                              \
            switch (last - first) { ALL_CASES(TILE_NAME) }                                                             \
            PUT_NAME(sums, (int)(last - first), y + first * outputs, outputs, count, bias);                            \
        }                                                                                                              \
    }

PANEL(panel_f32, tile_f32, put_f32, float, float, float)
PANEL(panel_bf16, tile_bf16, put_f32, bf16, float, float)
#ifdef __AVX512BF16__
PANEL(panel_pairs, tile_pairs, put_bf16, bf16, bf16, bf16)
#endif

static void widen(const bf16 *weights, long count, float *wide) {
    for (long i = 0; i < count; i += LANES) store_f32(wide + i, load_bf16(weights + i));
}

/* For many rows bfloat16 weights are widened once per panel. */
static void panel_widened(const bf16 *w, const float *bias, const float *x, long stride, float *y, long rows,
                          long inputs, long outputs, int count) {
    float *wide = rows > MAX_ROWS ? room(inputs * WIDTH) : 0;
    if (!wide) {
        panel_bf16(w, bias, x, stride, y, rows, inputs, outputs, count);
        return;
    }
    widen(w, inputs * WIDTH, wide);
    panel_f32(wide, bias, x, stride, y, rows, inputs, outputs, count);
}

/* Panels that a thread takes at a time, of all that there are. */
INLINE long panels_at_once(long panels, long threads) {
    long each = panels / (threads * 8);
    return each < 1 ? 1 : each > 16 ? 16 : each;
}

struct linear {
    const void *weight, *x;
    const float *bias;
    void *y;
    long stride, rows, inputs, outputs, panels, panels_each;
};

#ifdef __AMX_BF16__
#include "tiles.h"
#define BY_TILES(l, first, last)                                                                                       \
    if (fills_tiles(l->inputs)) {                                                                                      \
        panels_by_tiles(l, first, last);                                                                               \
        return;                                                                                                        \
    }
#else
#define tiles_allowed 0
int32_t allow_tiles(void) { return 0; }
#define BY_TILES(l, first, last)
#endif
#ifdef __AVX512BF16__
#include "pairs.h"
#else
#define begin_pairs(uses_tiles) ((void)0)
#define end_pairs(uses_tiles) ((void)0)
#endif
#define BY_VECTORS(l, first, last)

/* Threads take a few panels at a time. INSTEAD may do them another way. */
#define LINEAR(NAME, INSTEAD, PANEL_NAME, WEIGHT, X, Y)                                                                \
    static void NAME##_part(void *arguments, long part) {                                                              \
        const struct linear *l = arguments;                                                                            \
        long last = (part + 1) * l->panels_each < l->panels ? (part + 1) * l->panels_each : l->panels;                 \
        INSTEAD(l, part * l->panels_each, last)                                                                        \
        for (long panel = part * l->panels_each; panel < last; panel++) {                                              \
            long first = panel * WIDTH, left = l->outputs - first;                                                     \
            PANEL_NAME((const WEIGHT *)l->weight + first * l->inputs, l->bias ? l->bias + first : 0, l->x, l->stride,  \
                       (Y *)l->y + first, l->rows, l->inputs, l->outputs, (int)(left < WIDTH ? left : WIDTH));         \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(const WEIGHT *weight, const float *bias, const X *x, long stride, Y *y, long rows, long inputs,          \
              long outputs, int threads) {                                                                             \
        long panels = (outputs + WIDTH - 1) / WIDTH, each = panels_at_once(panels, threads);                           \
        struct linear l = {weight, x, bias, y, stride, rows, inputs, outputs, panels, each};                           \
        in_parallel(NAME##_part, &l, (panels + each - 1) / each, threads);                                             \
    }

LINEAR(linear_f32, BY_VECTORS, panel_f32, float, float, float)
LINEAR(linear_bf16, BY_VECTORS, panel_widened, bf16, float, float)
#ifdef __AVX512BF16__
LINEAR(linear_pairs, BY_TILES, panel_pairs, bf16, bf16, bf16)
#endif

/* ---- attention of one token per sequence ----------------------------------------------------------------------------
 *
 * q is [sequences, heads, size], keys and values [blocks, block_size, key_heads, size], out [sequences, heads, size].
 * Scores of a piece of the context at a time; the maximum so far is kept, and sums are scaled when it rises (Milakov
 * and Gimelshein 2018, https://arxiv.org/abs/1805.02867). While one piece is computed, the next is fetched.
 */

#define PIECE 64 /* tokens, of prompts; of one token the next piece has to find room in a core's cache beside this one */
#define DECODE_PIECE 32
#define MAX_GROUP 4
#define MAX_SIZE 256 /* of a head */

struct attention {
    const void *q, *keys, *values;
    void *out;
    const int32_t *block_table; /* [sequences, table_width] */
    const int32_t *contexts;    /* [sequences] */
    const int64_t *rows;        /* [sequences]: of q and out; 0: one after another */
    long sequences, heads, key_heads, size, block_size, table_width, q_stride, window; /* window 0: none */
    float scale, softcap;                                                              /* softcap 0: none */
    int threads, failed;                                                               /* failed 1: out of memory */
    long keys_each;                                                                    /* key heads of a task */
};

/* Where the tokens of a piece are, in rows of the cache. */
struct piece {
    int count;
    long slots[PIECE];
};

static void find_piece(struct piece *piece, long most, long block_size, const int32_t *table, long start, long context) {
    piece->count = (int)(context - start < most ? context - start : most);
    long block = start / block_size, in_block = start % block_size;
    for (int t = 0; t < piece->count; t++) {
        if (in_block == block_size) block++, in_block = 0;
        piece->slots[t] = table[block] * block_size + in_block++;
    }
}

/* The first token that the last of a context's sees. */
INLINE long first_seen(const struct attention *a, long context) {
    return a->window && context > a->window ? context - a->window : 0;
}

/* As far as a core's second cache: more can be under way than to its first one. */
INLINE void fetch(const void *row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)row + at, 0, 2);
}

/* Of a task that this thread may take when the present one is done. */
static void find_first_piece(const struct attention *a, struct piece *piece, long task) {
    const long sequence = task / (a->key_heads / a->keys_each);
    piece->count = 0;
    if (sequence >= a->sequences || a->keys_each < a->key_heads) return;
    const long context = a->contexts[sequence];
    find_piece(piece, DECODE_PIECE, a->block_size, a->block_table + sequence * a->table_width, first_seen(a, context),
               context);
}

/* The scores of one head: weights in their place, the running sum, and the factor for what was mixed so far. */
static float weigh(float *scores, int count, float softcap, float *highest, float *sum) {
    if (softcap > 0)
        for (int t = 0; t < count; t++) scores[t] = softcap * tanhf(scores[t] / softcap);
    for (int t = count; t % LANES; t++) scores[t] = -INFINITY; /* up to a whole vector */
    vec tops = splat(*highest), added = {0};
    for (int t = 0; t < count; t += LANES) tops = larger(tops, load_f32(scores + t));
    float top = largest(tops);
    for (int t = 0; t < count; t += LANES) {
        vec weights = power_of_e(load_f32(scores + t) - top);
        store_f32(scores + t, weights);
        added += weights;
    }
    float shrink = expf(*highest - top);
    *highest = top, *sum = *sum * shrink + total(added);
    return shrink;
}

#ifdef __AMX_BF16__
#include "tiles_attention.h"
#else
#define score_by_tiles(a, keys, now, heads, group, scores) 0
#define end_scores() ((void)0)
#endif
#ifdef __AVX512BF16__
#include "pairs_attention.h"
#else
#define score_by_pairs(a, keys, now, next, heads, group, scores) 0
#define mix_by_pairs(a, values, now, next, group, scores, shrink, mixed) 0
#endif
#define score_by_vectors(a, keys, now, next, heads, group, scores) 0
#define mix_by_vectors(a, values, now, next, group, scores, shrink, mixed) 0

/* One piece for GROUP_SIZE query heads of one key head; heads, q, mixed, highest and sums are those of the first. Scores
 * are SCORED some other way, or q times keys here, and so are values MIXED. */
#define GROUP(NAME, GROUP_SIZE, SCORED, MIXED, T, LOAD)                                                                \
    static void NAME##_##GROUP_SIZE(const struct attention *a, const T *keys, const T *values,                         \
                                    const struct piece *now, const struct piece *next, const T *heads, const float *q, \
                                    float *mixed, float *highest, float *sums) {                                       \
        const int group = GROUP_SIZE, vectors = (int)(a->size / LANES);                                                \
        const long size = a->size, row = a->key_heads * size;                                                          \
        float scores[GROUP_SIZE][DECODE_PIECE], shrink[GROUP_SIZE];                                                    \
        const int unscored = SCORED(a, keys, now, next, heads, GROUP_SIZE, scores[0]) ? 0 : now->count;                \
        for (int t = 0; t < unscored; t++) {                                                                           \
            const T *key = keys + now->slots[t] * row;                                                                 \
            vec partial[GROUP_SIZE];                                                                                   \
            UNROLL for (int g = 0; g < group; g++) partial[g] = (vec){0};                                              \
            for (int i = 0; i < vectors; i++) {                                                                        \
                vec k = LOAD(key + i * LANES);                                                                         \
                UNROLL for (int g = 0; g < group; g++) partial[g] += k * load_f32(q + g * size + i * LANES);           \
            }                                                                                                          \
            UNROLL for (int g = 0; g < group; g++) scores[g][t] = total(partial[g]);                                   \
        }                                                                                                              \
        for (int g = 0; g < group; g++)                                                                                \
            shrink[g] = weigh(scores[g], now->count, a->softcap, highest + g, sums + g);                               \
        if (MIXED(a, values, now, next, GROUP_SIZE, scores[0], shrink, mixed)) return;                                 \
        for (int i = 0; i < vectors; i++) {                                                                            \
            vec so_far[GROUP_SIZE];                                                                                    \
            UNROLL for (int g = 0; g < group; g++) so_far[g] = load_f32(mixed + g * size + i * LANES) * shrink[g];     \
            for (int t = 0; t < now->count; t++) {                                                                     \
                if (i == 0 && t < next->count) {                                                                       \
                    fetch(keys + next->slots[t] * row, size * sizeof(T));                                              \
                    fetch(values + next->slots[t] * row, size * sizeof(T));                                            \
                }                                                                                                      \
                vec v = LOAD(values + now->slots[t] * row + i * LANES);                                                \
                UNROLL for (int g = 0; g < group; g++) so_far[g] += v * scores[g][t];                                  \
            }                                                                                                          \
            UNROLL for (int g = 0; g < group; g++) store_f32(mixed + g * size + i * LANES, so_far[g]);                 \
        }                                                                                                              \
    }

/* A task is some key heads of one sequence: all of them, so that rows are read as they lie, or one, for more tasks. */
#define ATTEND(NAME, SCORED, MIXED, T, LOAD, STORE)                                                                    \
    GROUP(NAME, 1, SCORED, MIXED, T, LOAD)                                                                             \
    GROUP(NAME, 2, SCORED, MIXED, T, LOAD)                                                                             \
    GROUP(NAME, 3, SCORED, MIXED, T, LOAD)                                                                             \
    GROUP(NAME, 4, SCORED, MIXED, T, LOAD)                                                                             \
    static void NAME##_task(void *arguments, long task) {                                                              \
        struct attention *a = arguments;                                                                               \
        const long tasks_each = a->key_heads / a->keys_each, sequence = task / tasks_each;                             \
        const long first_key = task % tasks_each * a->keys_each;                                                       \
        const long per_key = a->heads / a->key_heads, heads = a->keys_each * per_key, size = a->size;                  \
        float *memory = room(2 * heads * (size + 1));                                                                  \
        if (!memory) {                                                                                                 \
            a->failed = 1;                                                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        const int32_t *table = a->block_table + sequence * a->table_width;                                             \
        const long place = a->rows ? a->rows[sequence] : sequence;                                                     \
        const T *source = (const T *)a->q + place * a->q_stride + first_key * per_key * size;                          \
        T *target = (T *)a->out + (place * a->heads + first_key * per_key) * size;                                     \
        float *q = memory, *mixed = q + heads * size, *highest = mixed + heads * size, *sums = highest + heads;        \
        for (long i = 0; i < heads * size; i += LANES) {                                                               \
            store_f32(q + i, LOAD(source + i) * a->scale);                                                             \
            store_f32(mixed + i, (vec){0});                                                                            \
        }                                                                                                              \
        for (long head = 0; head < heads; head++) highest[head] = -INFINITY, sums[head] = 0;                           \
        long context = a->contexts[sequence], start = first_seen(a, context);                                          \
        struct piece pieces[2], *now = pieces, *next = pieces + 1;                                                     \
        find_piece(now, DECODE_PIECE, a->block_size, table, start, context);                                           \
        for (; start < context; start += DECODE_PIECE) {                                                               \
            find_piece(next, DECODE_PIECE, a->block_size, table, start + DECODE_PIECE, context);                       \
            if (next->count <= 0) find_first_piece(a, next, task + a->threads);                                        \
            for (long head = 0; head < heads;) {                                                                       \
                long key_head = first_key + head / per_key, left = per_key - head % per_key;                           \
                const T *keys = (const T *)a->keys + key_head * size, *values = (const T *)a->values + key_head * size; \
                const T *own = source + head * size;                                                                   \
                float *own_q = q + head * size, *own_mixed = mixed + head * size;                                      \
                switch (left) {                                                                                        \
                    case 1: NAME##_1(a, keys, values, now, next, own, own_q, own_mixed, highest + head, sums + head); break; \
                    case 2: NAME##_2(a, keys, values, now, next, own, own_q, own_mixed, highest + head, sums + head); break; \
                    case 3: NAME##_3(a, keys, values, now, next, own, own_q, own_mixed, highest + head, sums + head); break; \
                    default: NAME##_4(a, keys, values, now, next, own, own_q, own_mixed, highest + head, sums + head); \
                }                                                                                                      \
                head += left < MAX_GROUP ? left : MAX_GROUP;                                                           \
            }                                                                                                          \
            struct piece *done = now;                                                                                  \
            now = next, next = done;                                                                                   \
        }                                                                                                              \
        for (long head = 0; head < heads; head++)                                                                      \
            for (long i = head * size; i < (head + 1) * size; i += LANES)                                              \
                STORE(target + i, load_f32(mixed + i) / sums[head]);                                                   \
        end_scores();                                                                                                  \
    }                                                                                                                  \
    void NAME(struct attention *a) {                                                                                   \
        a->keys_each = a->sequences < 4 * a->threads ? 1 : a->key_heads;                                               \
        in_parallel(NAME##_task, a, a->sequences * (a->key_heads / a->keys_each), a->threads);                         \
    }

ATTEND(attend_f32, score_by_vectors, mix_by_vectors, float, load_f32, store_f32)
ATTEND(attend_bf16, score_by_pairs, mix_by_pairs, bf16, load_bf16, store_bf16)

/* ---- attention of several tokens per sequence -----------------------------------------------------------------------
 *
 * A task is a tile, a few tokens of one sequence, with one key head: rows are its tokens with each query head. Keys of
 * a piece are turned around, so that the scores of LANES keys are one vector; then scores are q times keys, and what
 * is mixed is weights times values, both products of small matrices. Each row sees the keys up to its own.
 */

#define TILE_TOKENS 32
#define ROW_BLOCK (LANES == 16 ? 8 : 4)
#define SPAN 2

struct tile {
    int64_t table_row, token, position, count; /* position: of its first token, in the sequence */
};

struct prefill {
    const void *q, *keys, *values;
    void *out;
    const int32_t *block_table;
    const struct tile *tiles;
    long num_tiles, heads, key_heads, size, block_size, table_width, q_stride, window;
    float scale, softcap;
    int threads, failed;
};

/* c += a @ b for ROW_BLOCK rows: a [rows, depth], b [depth, stride], c [rows, stride]; of b's and c's columns the first
 * `width`, in whole spans. */
static void multiply(const float *a, long a_stride, const float *b, long stride, int depth, float *c, long width) {
    for (long at = 0; at < width; at += SPAN * LANES) {
        vec sums[ROW_BLOCK][SPAN];
        UNROLL for (int r = 0; r < ROW_BLOCK; r++)
            UNROLL for (int i = 0; i < SPAN; i++) sums[r][i] = load_f32(c + r * stride + at + i * LANES);
        for (int k = 0; k < depth; k++) {
            vec row[SPAN];
            UNROLL for (int i = 0; i < SPAN; i++) row[i] = load_f32(b + k * stride + at + i * LANES);
            UNROLL for (int r = 0; r < ROW_BLOCK; r++) {
                vec value = splat(a[r * a_stride + k]);
                UNROLL for (int i = 0; i < SPAN; i++) sums[r][i] += value * row[i];
            }
        }
        UNROLL for (int r = 0; r < ROW_BLOCK; r++)
            UNROLL for (int i = 0; i < SPAN; i++) store_f32(c + r * stride + at + i * LANES, sums[r][i]);
    }
}

/* Scores of keys first, first + 1, … of the piece up to `seen` become weights, others 0; mixed is scaled. */
static void weigh_row(float *scores, long first, long seen, float softcap, float *highest, float *sum, float *mixed,
                      long size) {
    if (first < 0) first = 0;
    if (seen > PIECE) seen = PIECE;
    if (seen <= first) {
        for (int t = 0; t < PIECE; t++) scores[t] = 0;
        return;
    }
    for (long t = 0; t < first; t++) scores[t] = -INFINITY;
    float shrink = weigh(scores, (int)seen, softcap, highest, sum);
    for (long t = (seen + LANES - 1) / LANES * LANES; t < PIECE; t++) scores[t] = 0;
    if (shrink != 1.0f)
        for (long i = 0; i < size; i += LANES) store_f32(mixed + i, load_f32(mixed + i) * shrink);
}

#define PREFILL(NAME, ANOTHER_TASK, T, LOAD, STORE)                                                                    \
    static void NAME##_task(void *arguments, long task) {                                                              \
        struct prefill *a = arguments;                                                                                 \
        const struct tile tile = a->tiles[task / a->key_heads];                                                        \
        const long key_head = task % a->key_heads, per_key = a->heads / a->key_heads, size = a->size;                  \
        const long rows = tile.count * per_key, padded = (rows + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;               \
        const long row = a->key_heads * size;                                                                          \
        const int32_t *table = a->block_table + tile.table_row * a->table_width;                                       \
        float *memory = room(padded * (2 * size + PIECE + 2) + 2 * size * PIECE);                                      \
        if (!memory) {                                                                                                 \
            a->failed = 1;                                                                                             \
            return;                                                                                                    \
        }                                                                                                              \
        float *q = memory, *mixed = q + padded * size, *scores = mixed + padded * size;                                \
        float *turned = scores + padded * PIECE, *values = turned + size * PIECE;                                      \
        float *highest = values + size * PIECE, *sums = highest + padded;                                              \
        memset(q, 0, 2 * padded * size * sizeof(float));                                                               \
        for (long r = 0; r < rows; r++) {                                                                              \
            long token = tile.token + r / per_key, head = key_head * per_key + r % per_key;                            \
            const T *source = (const T *)a->q + token * a->q_stride + head * size;                                     \
            for (long i = 0; i < size; i += LANES) store_f32(q + r * size + i, LOAD(source + i) * a->scale);           \
            highest[r] = -INFINITY, sums[r] = 0;                                                                       \
        }                                                                                                              \
        long context = tile.position + tile.count;                                                                     \
        long start = a->window && tile.position >= a->window ? tile.position - a->window + 1 : 0;                      \
        for (; start < context; start += PIECE) {                                                                      \
            struct piece piece;                                                                                        \
            find_piece(&piece, PIECE, a->block_size, table, start, context);                                           \
            for (int t = 0; t < PIECE; t++) {                                                                          \
                long slot = piece.slots[t < piece.count ? t : piece.count - 1];                                        \
                const T *key = (const T *)a->keys + slot * row + key_head * size;                                      \
                const T *value = (const T *)a->values + slot * row + key_head * size;                                  \
                for (long i = 0; i < size; i += LANES) {                                                               \
                    float lanes[LANES];                                                                                \
                    store_f32(lanes, LOAD(key + i));                                                                   \
                    UNROLL for (int lane = 0; lane < LANES; lane++) turned[(i + lane) * PIECE + t] = lanes[lane];      \
                    store_f32(values + t * size + i, LOAD(value + i));                                                 \
                }                                                                                                      \
            }                                                                                                          \
            memset(scores, 0, padded * PIECE * sizeof(float));                                                         \
            for (long r = 0; r < padded; r += ROW_BLOCK)                                                               \
                multiply(q + r * size, size, turned, PIECE, (int)size, scores + r * PIECE, piece.count);               \
            for (long r = 0; r < rows; r++) {                                                                          \
                long place = tile.position + r / per_key - start; /* of the row's token, in the piece */               \
                weigh_row(scores + r * PIECE, a->window ? place - a->window + 1 : 0, place + 1, a->softcap,            \
                          highest + r, sums + r, mixed + r * size, size);                                              \
            }                                                                                                          \
            for (long r = 0; r < padded; r += ROW_BLOCK)                                                               \
                multiply(scores + r * PIECE, PIECE, values, size, piece.count, mixed + r * size, size);                \
        }                                                                                                              \
        for (long r = 0; r < rows; r++) {                                                                              \
            long token = tile.token + r / per_key, head = key_head * per_key + r % per_key;                            \
            T *target = (T *)a->out + (token * a->heads + head) * size;                                                \
            for (long i = 0; i < size; i += LANES) STORE(target + i, load_f32(mixed + r * size + i) / sums[r]);        \
        }                                                                                                              \
    }                                                                                                                  \
    void NAME(struct prefill *a) {                                                                                     \
        void (*task)(void *, long) = ANOTHER_TASK(a);                                                                  \
        in_parallel(task ? task : NAME##_task, a, a->num_tiles * a->key_heads, a->threads);                            \
    }

#ifdef __AVX512BF16__
#include "pairs_prefill.h"
#else
#define task_of_pairs(a) 0
#endif
#define task_of_floats(a) 0

PREFILL(prefill_f32, task_of_floats, float, load_f32, store_f32)
PREFILL(prefill_bf16, task_of_pairs, bf16, load_bf16, store_bf16)

/* ---- rows -----------------------------------------------------------------------------------------------------------
 *
 * What happens to rows of hidden states between those products. Sums and steps in between are float32.
 */

struct rows {
    const void *x, *weight;
    void *out;
    long stride, rows, heads, size, rows_each;
    float eps;
};

static void share_rows(void (*run)(void *, long), struct rows *r, int threads) {
    if (!r->rows) return;
    r->rows_each = (r->rows + 4 * threads - 1) / (4 * threads);
    in_parallel(run, r, (r->rows + r->rows_each - 1) / r->rows_each, threads);
}

/* Pairs of values (a, b) become (a c - b s, b c + a s); `turn` is (c, s) for each. */
INLINE vec turn_by(vec value, vec turn) {
    vec swapped = SHUFFLE(value, SWAPPED), c = SHUFFLE(turn, EVENS), s = SHUFFLE(turn, ODDS);
    return value * c + swapped * s * SIGNS;
}

/* The rows that are this part's. */
#define EACH_ROW(r, a, part)                                                                                           \
    for (long r = part * a->rows_each; r < a->rows && r < (part + 1) * a->rows_each; r++)

#define ROWS(T, LOAD, STORE)                                                                                           \
    static void rms_norm_part_##T(void *arguments, long part) {                                                        \
        const struct rows *a = arguments;                                                                              \
        EACH_ROW(r, a, part) {                                                                                         \
            const T *row = (const T *)a->x + r * a->stride, *weight = a->weight;                                       \
            T *out = (T *)a->out + r * a->size;                                                                        \
            vec squares = {0};                                                                                         \
            for (long i = 0; i < a->size; i += LANES) squares += LOAD(row + i) * LOAD(row + i);                        \
            float factor = 1.0f / sqrtf(total(squares) / (float)a->size + a->eps);                                     \
            for (long i = 0; i < a->size; i += LANES) STORE(out + i, LOAD(row + i) * factor * LOAD(weight + i));       \
        }                                                                                                              \
    }                                                                                                                  \
    static void silu_product_part_##T(void *arguments, long part) {                                                    \
        const struct rows *a = arguments;                                                                              \
        EACH_ROW(r, a, part) {                                                                                         \
            const T *gates = (const T *)a->x + 2 * r * a->size, *ups = gates + a->size;                                \
            T *out = (T *)a->out + r * a->size;                                                                        \
            for (long i = 0; i < a->size; i += LANES) {                                                                \
                vec gate = LOAD(gates + i);                                                                            \
                STORE(out + i, gate / (1.0f + power_of_e(-gate)) * LOAD(ups + i));                                     \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    static void turn_pairs_part_##T(void *arguments, long part) {                                                      \
        const struct rows *a = arguments;                                                                              \
        EACH_ROW(r, a, part)                                                                                           \
            for (long head = 0; head < a->heads; head++)                                                               \
                for (long i = 0; i < a->size; i += LANES) {                                                            \
                    T *place = (T *)a->out + r * a->stride + head * a->size + i;                                       \
                    STORE(place, turn_by(LOAD(place), load_f32((const float *)a->weight + r * a->size + i)));          \
                }                                                                                                      \
    }                                                                                                                  \
    /* out = x / sqrt(mean(x * x) + eps) * weight */                                                                   \
    void rms_norm_##T(const T *x, long stride, const T *weight, T *out, long rows, long size, float eps, int threads) { \
        struct rows r = {.x = x, .weight = weight, .out = out, .stride = stride, .rows = rows, .size = size};          \
        r.eps = eps;                                                                                                   \
        share_rows(rms_norm_part_##T, &r, threads);                                                                    \
    }                                                                                                                  \
    /* out = gate * sigmoid(gate) * up; x holds gate and up side by side, size values each */                          \
    void silu_product_##T(const T *x, T *out, long rows, long size, int threads) {                                     \
        struct rows r = {.x = x, .out = out, .rows = rows, .size = size};                                              \
        share_rows(silu_product_part_##T, &r, threads);                                                                \
    }                                                                                                                  \
    /* Pairs of values (a, b) become (a c - b s, b c + a s); turns are (c, s), [rows, size / 2, 2] */                  \
    void turn_pairs_##T(T *x, long stride, const float *turns, long rows, long heads, long size, int threads) {        \
        struct rows r = {.weight = turns, .out = x, .stride = stride, .rows = rows, .heads = heads, .size = size};     \
        share_rows(turn_pairs_part_##T, &r, threads);                                                                  \
    }                                                                                                                  \
    /* Keys and values of tokens, `size` values each, into their slots; both slots and tokens are rows */              \
    void put_rows_##T(const T *keys, long key_stride, const T *values, long value_stride, const int64_t *slots,        \
                      T *cached_keys, T *cached_values, long rows, long size) {                                        \
        for (long r = 0; r < rows; r++) {                                                                              \
            memcpy(cached_keys + slots[r] * size, keys + r * key_stride, size * sizeof(T));                            \
            memcpy(cached_values + slots[r] * size, values + r * value_stride, size * sizeof(T));                      \
        }                                                                                                              \
    }

typedef float f32;
ROWS(f32, load_f32, store_f32)
ROWS(bf16, load_bf16, store_bf16)

/* The place of the largest value of each row, the first of several; of a row with not-a-numbers, the first of those. */
static void largest_places_part(void *arguments, long part) {
    const struct rows *a = arguments;
    EACH_ROW(r, a, part) {
        const float *row = (const float *)a->x + r * a->stride;
        vec tops = splat(-INFINITY);
        ivec places = {0}, at = {0};
        for (int lane = 0; lane < LANES; lane++) at[lane] = (uint32_t)lane;
        places = at;
        long i = 0;
        for (; i + LANES <= a->size; i += LANES, at += LANES) {
            vec x = load_f32(row + i);
            ivec is_top = (ivec)(x > tops) | ((ivec)(x != x) & (ivec)(tops == tops));
            tops = (vec)(((ivec)x & is_top) | ((ivec)tops & ~is_top));
            places = (at & is_top) | (places & ~is_top);
        }
        float top = row[0];
        long place = 0;
        for (int lane = 0; lane < LANES && i; lane++) {
            int is_top = tops[lane] != tops[lane] ? top == top || (long)places[lane] < place
                                                  : tops[lane] > top || (tops[lane] == top && (long)places[lane] < place);
            if (is_top) top = tops[lane], place = places[lane];
        }
        for (; i < a->size; i++)
            if (row[i] > top || (row[i] != row[i] && top == top)) top = row[i], place = i;
        ((int64_t *)a->out)[r] = place;
    }
}

void largest_places(const float *x, long stride, int64_t *places, long rows, long size, int threads) {
    struct rows r = {.x = x, .out = places, .stride = stride, .rows = rows, .size = size};
    share_rows(largest_places_part, &r, threads);
}

#include "experts.h"
#include "encoder_attention.h"
#include "encoder_layers.h"
#include "encoder_ends.h"
#include "expert_layers.h"
#include "expert_routes.h"
#include "decoder_layers.h"
