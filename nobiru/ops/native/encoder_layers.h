/* BERT's encoder layers on packed hidden states, all of them in one call. kernels.c includes this.
 *
 * A run of whole sequences goes through all layers by itself, so that its hidden states stay in a core's cache and
 * threads never wait for each other. Where there are fewer sequences than threads, all of them are one run, whose rows
 * and heads the threads share in each stage.
 *
 * Weights are panels of WIDTH outputs, as `pack` in library.py makes them: [inputs, WIDTH] of float32,
 * [inputs / 2, WIDTH, 2] of bfloat16, or [inputs / 4, WIDTH, 4] of int8. For int8 weights rows of inputs become unsigned
 * bytes with a scale and a zero point of their own, just before the product: x = (byte - zero) * scale. A sum of
 * products is (sum of bytes * weights - zero * sum of weights) * scale of the row * scale of the output.
 */

/* What multiplies; HALVED: rows of float32 by weights of bfloat16. From BYTES on weights are int8; SMALL_BYTES: from -64 to
 * 64, so that two products of a byte with them fit sixteen bits. */
enum { FLOATS, HALVED, PAIRS, PAIR_TILES, BYTES, BYTE_TILES, SMALL_BYTES };
enum { NO_ACTIVATION, GELU, GELU_TANH, RELU, SILU };

struct matrix {
    const void *panels;
    const float *bias, *scales, *sums; /* [outputs]; scales and sums of weights only for int8 */
    long inputs, outputs, by;
};

struct norm {
    const float *weight, *bias;
    float eps;
};

struct layer {
    struct matrix qkv, out, up, down;
    struct norm attention_norm, output_norm;
};

struct encoder {
    const struct layer *layers;
    void *hidden;              /* [tokens, width]: inputs, and outputs; float32 or bfloat16 */
    const int64_t *starts;     /* [sequences + 1] */
    const int64_t *runs;       /* [num_runs, 2]: first sequences, and ends */
    const float *bias;         /* as in struct heads */
    const int64_t *wanted;     /* [num_wanted]: if not 0, the tokens that get behind the last layer's attention */
    long num_wanted, num_layers, num_runs, width, inner, heads, bias_rows, bias_stride;
    float scale;
    int by, is_half, uses_tiles, activation, threads, failed;
};

/* Sequences on their way through one layer. */
struct run {
    struct encoder *e;
    const struct layer *layer;
    struct heads attention;
    char *hidden, *qkv, *attended; /* of the first row */
    const int64_t *wanted;         /* if not 0, those of the run's tokens, of which `start` is the first in the batch */
    long rows, rows_each, start, num_wanted;
};

#define MOST_ROWS 128 /* that pass through the layers behind attention at a time */

INLINE long value_bytes(int is_half) { return is_half ? 2 : 4; }
INLINE vec get(int is_half, const void *p, long i) {
    return is_half ? load_bf16((const bf16 *)p + i) : load_f32((const float *)p + i);
}
INLINE void set(int is_half, void *p, long i, vec x) {
#ifdef __AVX512BF16__
    if (is_half) _mm256_storeu_si256((__m256i *)((bf16 *)p + i), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    if (is_half) store_bf16((bf16 *)p + i, x);
#endif
    else store_f32((float *)p + i, x);
}

/* ---- activations ----------------------------------------------------------------------------------------------------*/

/* x times the normal distribution's integral up to x. For float32 results the error function is that of Abramowitz and
 * Stegun, 7.1.26, within 1.5e-7; for rounded ones a polynomial on -4 … 4, within 2e-4 of the result. */
INLINE vec gelu(const int is_exact, vec x) {
    if (!is_exact) {
        vec t = larger(splat(-4.0f), smaller(splat(4.0f), x)), s = t * t;
        vec y = s * 2.2780170e-8f - 1.5985383e-6f;
        y = y * s + 4.7954268e-5f;
        y = y * s - 8.1400352e-4f;
        y = y * s + 8.7723313e-3f;
        y = y * s - 6.4572990e-2f;
        y = y * s + 3.9788327e-1f;
        return x * (y * t + 0.5f);
    }
    vec size = smaller(splat(1e30f), larger(x, -x)) * 0.70710678f, t = one_over(size * 0.3275911f + 1.0f);
    vec y = t * 1.061405429f - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = (y * t + 0.254829592f) * t * power_of_e(-size * size) * 0.5f; /* the part beyond |x| */
    ivec is_below = (ivec)(x < splat(0.0f));
    return x * either(is_below, y, 1.0f - y);
}

/* 1 / (1 + e to the power of -x); for rounded results within some 1e-4 of it. */
INLINE vec sigmoid(const int is_exact, vec x) {
#ifdef __AVX512BF16__
    if (!is_exact) {
        vec power = (vec)weight_of((__m512)-larger(splat(-80.0f), x));
        return (vec)_mm512_rcp14_ps((__m512)(power + 1.0f));
    }
#endif
    return 1.0f / (1.0f + power_of_e(-x));
}

INLINE vec activate(const int activation, const int is_exact, vec x) {
    switch (activation) {
        case GELU: return gelu(is_exact, x);
        case GELU_TANH: return x * sigmoid(is_exact, (x * x * 0.044715f + 1.0f) * x * 1.5957691216f);
        case RELU: return larger(x, splat(0.0f));
        case SILU: return x * sigmoid(is_exact, x);
        default: return x;
    }
}

/* ---- products -------------------------------------------------------------------------------------------------------*/

#ifdef HAS_SMALL_BYTES
#if LANES == 16
typedef __m512i bvec;
#define OF_BYTES(WHAT) _mm512_##WHAT
INLINE bvec load_bytes(const void *p) { return _mm512_loadu_si512(p); }
INLINE void store_bytes(void *p, bvec x) { _mm512_storeu_si512(p, x); }
#else
typedef __m256i bvec;
#define OF_BYTES(WHAT) _mm256_##WHAT
INLINE bvec load_bytes(const void *p) { return _mm256_loadu_si256(p); }
INLINE void store_bytes(void *p, bvec x) { _mm256_storeu_si256(p, x); }
#endif

/* Adds to each sum of 32 bits the products of four unsigned bytes and four weights. */
INLINE bvec add_small(bvec sums, bvec x, bvec w) {
    return OF_BYTES(add_epi32)(sums, OF_BYTES(madd_epi16)(OF_BYTES(maddubs_epi16)(x, w), OF_BYTES(set1_epi16)(1)));
}
#ifdef __AVX512VNNI__
INLINE bvec add_any(bvec sums, bvec x, bvec w) { return _mm512_dpbusd_epi32(sums, x, w); }
#endif

#define TILE_OF_BYTES(NAME, ADD)                                                                                       \
    INLINE void NAME(const int rows, const int8_t *w, const uint8_t *x, long stride, long inputs, struct ahead ahead,  \
                     int32_t *sums_out) {                                                                              \
        bvec sums[MAX_ROWS][2];                                                                                        \
        struct walk walk;                                                                                              \
        begin_walk(&walk, rows, x, stride);                                                                            \
        UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = (bvec){0};                                     \
        for (long k = 0; k < inputs; k += 4, w += 4 * WIDTH) {                                                         \
            bvec left = load_bytes(w), right = load_bytes(w + 2 * WIDTH);                                              \
            fetch_next(&ahead);                                                                                        \
            UNROLL for (int r = 0; r < rows; r++) {                                                                    \
                int32_t four;                                                                                          \
                memcpy(&four, row_of(&walk, r), 4);                                                                    \
                bvec value = OF_BYTES(set1_epi32)(four);                                                               \
                sums[r][0] = ADD(sums[r][0], value, left);                                                             \
                sums[r][1] = ADD(sums[r][1], value, right);                                                            \
            }                                                                                                          \
            step_on(&walk, rows, 4);                                                                                   \
        }                                                                                                              \
        UNROLL for (int r = 0; r < rows; r++) {                                                                        \
            store_bytes(sums_out + r * WIDTH, sums[r][0]);                                                             \
            store_bytes(sums_out + r * WIDTH + LANES, sums[r][1]);                                                     \
        }                                                                                                              \
    }

TILE_OF_BYTES(tile_small_bytes, add_small)
#ifdef __AVX512VNNI__
TILE_OF_BYTES(tile_bytes, add_any)
#endif
#endif

/* What a product takes: rows of float32, bfloat16 or bytes, `stride` bytes each. For tiles they lie in blocks of 32 rows, of
 * which the first 64 bytes come first, then the second: a tile is 1 KiB in one piece then, whatever the rows' length.
 */
struct inputs {
    const char *rows;
    long stride;
    const float *scales, *zeros; /* of rows of bytes */
};

INLINE int is_tiled(int by) { return by == PAIR_TILES || by == BYTE_TILES; }
INLINE int rows_at_once(int by) { return is_tiled(by) ? 32 : MAX_ROWS; }

/* A tile of rows of X by weights of W, whose sums are of S. */
#define PRODUCT(TILE_NAME, W, X, S)                                                                                    \
    do {                                                                                                               \
        const W *w = panel;                                                                                            \
        const X *x = (const X *)all_x;                                                                                 \
        const long stride = stride_bytes / (long)sizeof(X);                                                            \
        S *sums = to;                                                                                                  \
        switch (rows) { ALL_CASES(TILE_NAME) }                                                                         \
    } while (0)

/* The sums of up to rows_at_once rows by one panel, [rows, WIDTH], as float32 or int32. `ahead` as in kernels.c. */
static void multiply_panel(int by, const void *panel, const char *all_x, long stride_bytes, int rows, long inputs,
                           struct ahead ahead, void *to) {
    switch (by) {
#ifdef HAS_TILES
        case PAIR_TILES: {
            struct factors f = {all_x, panel, (const char *)panel + 64, 64, 2048, 128, 2048, inputs / 32, 128, rows, to};
            multiply_pair_tiles(&f);
            return;
        }
        case BYTE_TILES: {
            struct factors f = {all_x, panel, (const char *)panel + 64, 64, 2048, 128, 2048, inputs / 64, 128, rows, to};
            multiply_byte_tiles(&f);
            return;
        }
#endif
#ifdef HAS_SMALL_BYTES
        case SMALL_BYTES: PRODUCT(tile_small_bytes, int8_t, uint8_t, int32_t); return;
#endif
#ifdef __AVX512VNNI__
        case BYTES: PRODUCT(tile_bytes, int8_t, uint8_t, int32_t); return;
#endif
#ifdef __AVX512BF16__
        case PAIRS: PRODUCT(tile_pairs, bf16, bf16, float); return;
#endif
        case HALVED: PRODUCT(tile_bf16, bf16, float, float); return;
        default: PRODUCT(tile_f32, float, float, float);
    }
}

/* Values of one panel and up to rows_at_once rows, from their sums: the bias is added, and what `to` says is done. */
struct finish {
    int activation, is_half;
    char *values;         /* [rows, outputs] of float32 or bfloat16; or 0 */
    float *added;         /* else [rows, outputs]: */
    const char *residual; /* plus these values; without them what was there already */
};

INLINE void finish_panel(const int of_bytes, const int is_half, const int activation, const int adds,
                         const struct matrix *m, const struct inputs *in, const struct finish *to, const void *sums,
                         long row, int rows, long first) {
    vec bias[2], scales[2], of_weights[2];
    for (int half = 0; half < 2; half++) {
        bias[half] = m->bias ? load_f32(m->bias + first + half * LANES) : (vec){0};
        if (!of_bytes) continue;
        scales[half] = load_f32(m->scales + first + half * LANES);
        of_weights[half] = load_f32(m->sums + first + half * LANES);
    }
    for (int r = 0; r < rows; r++)
        UNROLL for (int half = 0; half < 2; half++) {
            const long from = r * WIDTH + half * LANES, at = (row + r) * m->outputs + first + half * LANES;
            vec x;
            if (of_bytes) {
                typedef int32_t svec __attribute__((vector_size(LANES * 4), aligned(4)));
                x = __builtin_convertvector(*(const svec *)((const int32_t *)sums + from), vec);
                x = (x - of_weights[half] * in->zeros[row + r]) * (scales[half] * in->scales[row + r]) + bias[half];
            } else {
                x = load_f32((const float *)sums + from) + bias[half];
            }
            if (adds) store_f32(to->added + at, x + (to->residual ? get(is_half, to->residual, at) : load_f32(to->added + at)));
            else set(is_half, to->values, at, activate(activation, !is_half, x));
        }
}

#define FINISH_WITH(ACTIVATION, ADDS)                                                                                  \
    if (of_bytes && half) finish_panel(1, 1, ACTIVATION, ADDS, m, in, to, sums, row, rows, first);                     \
    else if (of_bytes) finish_panel(1, 0, ACTIVATION, ADDS, m, in, to, sums, row, rows, first);                        \
    else if (half) finish_panel(0, 1, ACTIVATION, ADDS, m, in, to, sums, row, rows, first);                            \
    else finish_panel(0, 0, ACTIVATION, ADDS, m, in, to, sums, row, rows, first)

static void finish(int of_bytes, const struct matrix *m, const struct inputs *in, const struct finish *to,
                   const void *sums, long row, int rows, long first) {
    const int half = to->is_half;
    if (to->added) {
        FINISH_WITH(NO_ACTIVATION, 1);
        return;
    }
    switch (to->activation) {
        case GELU: FINISH_WITH(GELU, 0); break;
        case GELU_TANH: FINISH_WITH(GELU_TANH, 0); break;
        case RELU: FINISH_WITH(RELU, 0); break;
        case SILU: FINISH_WITH(SILU, 0); break;
        default: FINISH_WITH(NO_ACTIVATION, 0);
    }
}

INLINE long panel_bytes(const struct matrix *m) {
    return m->inputs * WIDTH * (m->by == FLOATS ? 4 : m->by < BYTES ? 2 : 1);
}

/* Rows are multiplied a block at a time: of equal size, or whole tiles and the rest. */
struct block {
    long row;
    int rows;
};
INLINE long num_blocks(const struct matrix *m, long rows) { return (rows + rows_at_once(m->by) - 1) / rows_at_once(m->by); }
INLINE struct block find_block(const struct matrix *m, long number, long blocks, long rows) {
    long row = is_tiled(m->by) ? 32 * number : number * rows / blocks;
    long end = is_tiled(m->by) ? row + 32 : (number + 1) * rows / blocks;
    return (struct block){row, (int)((end < rows ? end : rows) - row)};
}

INLINE const char *panel_at(const struct matrix *m, long panel) { return (const char *)m->panels + panel * panel_bytes(m); }

/* What a thread multiplies by behind its last panel, as far as one knows: meanwhile it is fetched. `ups` is 0 if that has no
 * panels of its own for the ups of a gated product. */
struct upcoming {
    const char *first, *ups;
};

/* Beside one block of rows by a panel of m, its share of the `next` panel is fetched. */
INLINE struct ahead fetch_of(const struct matrix *m, const char *next, long number, long blocks) {
    return fetch_part(next, panel_bytes(m), number, blocks, m->by == HALVED ? 2 * WIDTH : 4 * WIDTH);
}

/* A panel as the blocks of rows take it: for several of float32 bfloat16 weights are widened once, into `wide`. */
struct panel {
    const void *weights;
    int by;
};
INLINE float *room_to_widen(const struct matrix *m, long blocks, long panels) {
    return m->by == HALVED && blocks > 1 ? room(panels * m->inputs * WIDTH) : 0;
}
static struct panel open_panel(const struct matrix *m, long number, float *wide) {
    const void *weights = panel_at(m, number);
    if (!wide) return (struct panel){weights, (int)m->by};
    widen(weights, m->inputs * WIDTH, wide);
    return (struct panel){wide, FLOATS};
}

/* A linear layer on some rows, of these panels of outputs: one by one, each read from memory once for all rows. */
static void project_panels(const struct matrix *m, const struct inputs *in, long rows, const struct finish *to,
                           long first_panel, long last_panel, struct upcoming then) {
    float sums[32 * WIDTH] __attribute__((aligned(64)));
    const long blocks = num_blocks(m, rows);
    float *wide = room_to_widen(m, blocks, 1);
    for (long panel = first_panel; panel < last_panel; panel++) {
        const struct panel w = open_panel(m, panel, wide);
        const char *next = panel + 1 == last_panel && then.first ? then.first : panel_at(m, panel + 1);
        for (long number = 0; number < blocks; number++) {
            const struct block b = find_block(m, number, blocks, rows);
            multiply_panel(w.by, w.weights, in->rows + b.row * in->stride, in->stride, b.rows, m->inputs,
                           fetch_of(m, next, number, blocks), sums);
            finish(m->by >= BYTES, m, in, to, sums, b.row, b.rows, panel * WIDTH);
        }
    }
}

static void project(const struct matrix *m, const struct inputs *in, long rows, const struct finish *to) {
    project_panels(m, in, rows, to, 0, m->outputs / WIDTH, (struct upcoming){0});
}

/* ---- rows -----------------------------------------------------------------------------------------------------------*/

/* One row as bytes: its range, which includes 0, is cut into 255 equal steps. `step` bytes from 64 values to the next. */
static void to_bytes(int is_half, const void *row, long size, uint8_t *bytes, long step, float *scale, float *zero) {
    typedef uint8_t narrow __attribute__((vector_size(LANES), aligned(1)));
    vec low = {0}, high = {0};
    for (long i = 0; i < size; i += LANES) {
        vec x = get(is_half, row, i);
        low = larger(low, -x), high = larger(high, x);
    }
    const float lowest = -largest(low), range = largest(high) - lowest;
    const float unit = range > 0 ? range / 255.0f : 1.0f, shift = nearbyintf(-lowest / unit), per_unit = 1.0f / unit;
    for (long i = 0; i < size; i += LANES) {
        vec whole = smaller(splat(255.0f), larger(splat(0.0f), get(is_half, row, i) * per_unit + shift));
        ivec bits = (ivec)(whole + 12582912.0f); /* rounded: 1.5 * 2^23 has no place for fractions */
        *(narrow *)(bytes + i / 64 * step + i % 64) = __builtin_convertvector(bits & 255, narrow);
    }
    *scale = unit, *zero = shift;
}

/* Rows [rows, size] as `by` takes them, in `memory` if they have to be others than they are. */
static struct inputs inputs_of(int by, int is_half, const char *rows_of_values, long rows, long size, char *memory) {
    const long bytes = size * value_bytes(is_half);
    if (by < PAIR_TILES) return (struct inputs){rows_of_values, bytes, 0, 0};
    if (by == PAIR_TILES) {
        for (long r = 0; r < rows; r++) {
            const char *from = rows_of_values + r * bytes;
            char *to = memory + r / 32 * 32 * bytes + r % 32 * 64;
            for (long i = 0; i < bytes; i += 64) memcpy(to + 32 * i, from + i, 64);
        }
        return (struct inputs){memory, bytes, 0, 0};
    }
    float *scales = (float *)memory, *zeros = scales + MOST_ROWS;
    uint8_t *to = (uint8_t *)(zeros + MOST_ROWS);
    const int tiled = is_tiled(by);
    for (long r = 0; r < rows; r++)
        to_bytes(is_half, rows_of_values + r * bytes, size, to + (tiled ? r / 32 * 32 * size + r % 32 * 64 : r * size),
                 tiled ? 2048 : 64, scales + r, zeros + r);
    return (struct inputs){(const char *)to, size, scales, zeros};
}

/* Layer normalization of float32 rows [rows, size] into hidden states. */
static void normalize(int is_half, const struct norm *norm, const float *rows_of_values, long rows, long size, char *to) {
    for (long r = 0; r < rows; r++) {
        const float *x = rows_of_values + r * size;
        vec added = {0}, squares = {0};
        for (long i = 0; i < size; i += LANES) added += load_f32(x + i);
        const float mean = total(added) / (float)size;
        for (long i = 0; i < size; i += LANES) {
            vec apart = load_f32(x + i) - mean;
            squares += apart * apart;
        }
        const float factor = 1.0f / sqrtf(total(squares) / (float)size + norm->eps);
        for (long i = 0; i < size; i += LANES) {
            vec y = (load_f32(x + i) - mean) * factor * load_f32(norm->weight + i) + load_f32(norm->bias + i);
            set(is_half, to, r * size + i, y);
        }
    }
}

/* ---- stages of a layer ----------------------------------------------------------------------------------------------*/

/* Memory of a part, for up to MOST_ROWS rows: inputs as tiles or bytes, values of the feed-forward, and sums with the
 * residual. Tiles may be read behind the last row. */
struct part_memory {
    char *inputs, *inner;
    float *added;
};

static int take_part_memory(const struct encoder *e, struct part_memory *memory) {
    const long widest = e->width > e->inner ? e->width : e->inner;
    const long of_inputs = up_to(MOST_ROWS * widest * (e->by == PAIR_TILES ? 2 : 1) + 8 * MOST_ROWS, 64);
    const long of_inner = up_to(MOST_ROWS * e->inner * value_bytes(e->is_half), 64);
    char *all = space(SPACE_OF_PART, of_inputs + of_inner + 4 * MOST_ROWS * e->width);
    if (!all) return 1;
    memory->inputs = all, memory->inner = all + of_inputs, memory->added = (float *)(all + of_inputs + of_inner);
    return 0;
}

/* Rows first to first + rows, at most MOST_ROWS of them: hidden states to queries, keys and values. */
static void project_rows(const struct run *run, long first, long rows) {
    const struct encoder *e = run->e;
    struct part_memory memory;
    if (take_part_memory(e, &memory)) {
        run->e->failed = 1;
        return;
    }
    const long row = e->width * value_bytes(e->is_half);
    struct inputs in = inputs_of(e->by, e->is_half, run->hidden + first * row, rows, e->width, memory.inputs);
    struct finish to = {NO_ACTIVATION, e->is_half, run->qkv + 3 * first * row, 0, 0};
    project(&run->layer->qkv, &in, rows, &to);
}

/* The same rows: from what attention gave to the layer's hidden states. */
static void finish_rows(const struct run *run, long first, long rows) {
    const struct encoder *e = run->e;
    const struct layer *layer = run->layer;
    struct part_memory memory;
    if (take_part_memory(e, &memory)) {
        run->e->failed = 1;
        return;
    }
    const long row = e->width * value_bytes(e->is_half);
    char *hidden = run->hidden + first * row;
    struct finish sum = {NO_ACTIVATION, e->is_half, 0, memory.added, hidden};
    struct finish inner = {e->activation, e->is_half, memory.inner, 0, 0};
    struct inputs in = inputs_of(e->by, e->is_half, run->attended + first * row, rows, e->width, memory.inputs);
    project(&layer->out, &in, rows, &sum);
    normalize(e->is_half, &layer->attention_norm, memory.added, rows, e->width, hidden);
    in = inputs_of(e->by, e->is_half, hidden, rows, e->width, memory.inputs);
    project(&layer->up, &in, rows, &inner);
    in = inputs_of(e->by, e->is_half, memory.inner, rows, e->inner, memory.inputs);
    project(&layer->down, &in, rows, &sum);
    normalize(e->is_half, &layer->output_norm, memory.added, rows, e->width, hidden);
}

/* Queries, keys, values and what attention gives, for `rows` rows; 1 if there is no memory. */
static int begin_run(struct run *run, struct encoder *e, long first_sequence, long sequences) {
    const long start = e->starts[first_sequence], row = e->width * value_bytes(e->is_half);
    const long rows = e->starts[first_sequence + sequences] - start, of_qkv = up_to(3 * row * rows, 64);
    char *memory = space(SPACE_OF_RUN, of_qkv + rows * row);
    if (!memory) return 1;
    *run = (struct run){.e = e, .hidden = (char *)e->hidden + start * row, .qkv = memory, .attended = memory + of_qkv};
    run->rows = rows, run->start = start;
    if (e->wanted) {
        const int64_t *end = e->wanted + e->num_wanted;
        for (run->wanted = e->wanted; run->wanted < end && *run->wanted < start;) run->wanted++;
        while (run->wanted + run->num_wanted < end && run->wanted[run->num_wanted] < start + rows) run->num_wanted++;
    }
    run->attention = (struct heads){
        /* starts count from the batch's first token, and so do these */
        .q = memory - 3 * row * start, .keys = memory - 3 * row * start + row, .values = memory - 3 * row * start + 2 * row,
        .out = run->attended - row * start, .bias = e->bias, .starts = e->starts + first_sequence, .sequences = sequences,
        .heads = e->heads, .size = e->width / e->heads, .stride = 3 * e->width, .out_stride = e->width,
        .bias_rows = e->bias_rows, .bias_stride = e->bias_stride, .scale = e->scale, .is_half = e->is_half,
        .uses_tiles = e->uses_tiles};
    return 0;
}

/* In front of the last stage of all: rows that nobody asks for stay as they are, and the others close up. */
static void close_up(struct run *run) {
    const long row = run->e->width * value_bytes(run->e->is_half);
    for (long i = 0; i < run->num_wanted; i++) {
        const long from = run->wanted[i] - run->start;
        if (from == i) continue;
        memcpy(run->hidden + i * row, run->hidden + from * row, (size_t)row);
        memcpy(run->attended + i * row, run->attended + from * row, (size_t)row);
    }
    run->rows = run->num_wanted;
}

/* Behind it they go back to their places. */
static void open_up(const struct run *run) {
    const long row = run->e->width * value_bytes(run->e->is_half);
    for (long i = run->num_wanted - 1; i >= 0; i--) {
        const long to = run->wanted[i] - run->start;
        if (to > i) memcpy(run->hidden + to * row, run->hidden + i * row, (size_t)row);
    }
}

/* All layers of one run, on one thread. */
static void encode_run(void *arguments, long number) {
    struct encoder *e = arguments;
    struct run run;
    if (begin_run(&run, e, e->runs[2 * number], e->runs[2 * number + 1] - e->runs[2 * number])) {
        e->failed = 1;
        return;
    }
    begin_pairs(e->uses_tiles);
    for (long layer = 0; layer < e->num_layers && !e->failed; layer++) {
        run.layer = e->layers + layer;
        for (long row = 0; row < run.rows; row += MOST_ROWS)
            project_rows(&run, row, run.rows - row < MOST_ROWS ? run.rows - row : MOST_ROWS);
        for (long task = 0; task < run.attention.sequences * e->heads; task++)
            if (attend_head(&run.attention, task / e->heads, task % e->heads)) e->failed = 1;
        if (run.wanted && layer == e->num_layers - 1) close_up(&run);
        for (long row = 0; row < run.rows; row += MOST_ROWS)
            finish_rows(&run, row, run.rows - row < MOST_ROWS ? run.rows - row : MOST_ROWS);
    }
    open_up(&run);
    end_pairs(e->uses_tiles);
}

#define ROWS_PART(NAME, STAGE)                                                                                         \
    static void NAME(void *arguments, long part) {                                                                     \
        const struct run *run = arguments;                                                                             \
        const long first = part * run->rows_each, left = run->rows - first;                                            \
        begin_pairs(run->e->uses_tiles);                                                                               \
        STAGE(run, first, left < run->rows_each ? left : run->rows_each);                                              \
        end_pairs(run->e->uses_tiles);                                                                                 \
    }
ROWS_PART(project_rows_part, project_rows)
ROWS_PART(finish_rows_part, finish_rows)

static void attend_part(void *arguments, long task) {
    const struct run *run = arguments;
    begin_pairs(run->e->uses_tiles);
    if (attend_head(&run->attention, task / run->e->heads, task % run->e->heads)) run->e->failed = 1;
    end_pairs(run->e->uses_tiles);
}

/* How many parts a stage's rows are cut into. */
static long cut_rows(struct run *run) {
    const long threads = run->e->threads;
    run->rows_each = up_to((run->rows + 2 * threads - 1) / (2 * threads), 32);
    if (run->rows_each > MOST_ROWS) run->rows_each = MOST_ROWS;
    return (run->rows + run->rows_each - 1) / run->rows_each;
}

/* All layers of all sequences as one run, stage by stage on all threads. */
static void encode_together(struct encoder *e) {
    struct run run;
    if (begin_run(&run, e, 0, e->runs[1])) {
        e->failed = 1;
        return;
    }
    long parts = cut_rows(&run);
    for (long layer = 0; layer < e->num_layers && !e->failed; layer++) {
        run.layer = e->layers + layer;
        in_parallel(project_rows_part, &run, parts, e->threads);
        in_parallel(attend_part, &run, run.attention.sequences * e->heads, e->threads);
        if (run.wanted && layer == e->num_layers - 1) {
            close_up(&run);
            parts = cut_rows(&run);
        }
        in_parallel(finish_rows_part, &run, parts, e->threads);
    }
    open_up(&run);
}

void encode(struct encoder *e) {
    if (e->num_runs == 1) encode_together(e);
    else in_parallel(encode_run, e, e->num_runs, e->threads);
}
