/* Llama's decoder layers over a KV cache, all of them in one call. kernels.c includes this.
 *
 * Products are those of encoder_layers.h and expert_layers.h, and the way to experts is that of expert_routes.h. The sum
 * that passes through the layers is float32 whatever the dtype. Few rows share what they read of the weights: each product
 * is cut by panels of outputs, and threads meet behind it. Many rows are cut into blocks, each of which passes through all
 * that stands between two attentions on one thread, so that it stays in that core's cache; experts are between, too.
 */

struct decoder_layer {
    struct matrix qkv, out, gate_up, down; /* the last two are 0 where the layer has experts */
    const struct moe *moe;                 /* or 0 */
    const void *attention_norm, *mlp_norm; /* [width], like hidden states */
    const void *qk_norm;                   /* [heads + key heads, size], or 0 */
    void *keys, *values;
    float attention_eps, mlp_eps, qk_eps;
    long window;
};

struct decoder {
    const struct decoder_layer *layers;
    float *hidden;        /* [tokens, width]: inputs; overwritten */
    void *out;            /* [tokens, width]: normalized outputs */
    const void *norm;
    const float *turns;   /* [tokens, size]: cosine and sine of each pair of values */
    const int64_t *slots; /* [tokens]: rows of the cache */
    const int64_t *expert_slots; /* [layers with experts, experts]: where each is */
    int64_t *loads;              /* like these: how many rows each got; written */
    const int64_t *wanted;       /* [num_wanted]: the tokens that get behind the last layer's attention, if not all do */
    struct attention decode; /* of sequences with one token, and of the others: what is the same in all layers */
    struct prefill prefill;
    long num_layers, tokens, width, num_wanted; /* tokens: of these from then on */
    float eps;
    /* attends_only: one layer, up to the norm in front of its feed-forward, which somebody else computes from `out`. */
    int is_half, uses_tiles, attends_only, drops_others, threads, failed;
};

/* The batch on its way through one layer. */
struct pass {
    struct decoder *d;
    const struct decoder_layer *layer, *next; /* next: 0 behind the last */
    char *qkv, *attended;
    struct routes routes; /* of a layer with experts */
    long heads, key_heads, size, rows_each, parts; /* rows of a part, and parts of all rows */
    int is_few;
};

INLINE long row_bytes(const struct decoder *d, long values) { return values * value_bytes(d->is_half); }

static void normalize_rms(const struct decoder *d, const void *weight, float eps, long first, long rows, char *to) {
    for (long r = 0; r < rows; r++) {
        const float *x = d->hidden + (first + r) * d->width;
        vec squares = {0};
        for (long i = 0; i < d->width; i += LANES) squares += load_f32(x + i) * load_f32(x + i);
        const float factor = 1.0f / sqrtf(total(squares) / (float)d->width + eps);
        for (long i = 0; i < d->width; i += LANES)
            set(d->is_half, to, r * d->width + i, load_f32(x + i) * factor * get(d->is_half, weight, i));
    }
}

/* Queries and keys of some rows are normalized, if they are in this model, and turned; keys and values are put away. */
static void place_rows(const struct pass *p, long first, long rows) {
    const struct decoder *d = p->d;
    const int half = d->is_half;
    const long size = p->size, turned = (p->heads + p->key_heads) * size, of_keys = p->key_heads * size;
    for (long r = first; r < first + rows; r++) {
        char *row = p->qkv + r * row_bytes(d, turned + of_keys);
        for (long head = 0; head < turned; head += size) {
            float factor = 1.0f;
            if (p->layer->qk_norm) {
                vec squares = {0};
                for (long i = head; i < head + size; i += LANES) squares += get(half, row, i) * get(half, row, i);
                factor = 1.0f / sqrtf(total(squares) / (float)size + p->layer->qk_eps);
            }
            for (long i = 0; i < size; i += LANES) {
                vec value = get(half, row, head + i), turn = load_f32(d->turns + r * size + i);
                if (p->layer->qk_norm) value *= factor * get(half, p->layer->qk_norm, head + i);
                set(half, row, head + i, turn_by(value, turn));
            }
        }
        const long at = row_bytes(d, d->slots[r] * of_keys), bytes = row_bytes(d, of_keys);
        memcpy((char *)p->layer->keys + at, row + row_bytes(d, p->heads * size), (size_t)bytes);
        memcpy((char *)p->layer->values + at, row + row_bytes(d, turned), (size_t)bytes);
    }
}

/* Memory for some rows between two attentions: of a product's inputs where they have to lie in another way, normalized
 * rows, and values of the feed-forward or scores of the gate. Good until the thread is at another part. */
struct bench {
    char *inputs, *normed, *inner;
};

static int take_bench(const struct pass *p, long rows, struct bench *bench) {
    const struct decoder *d = p->d;
    const struct moe *moe = p->layer->moe;
    const long attended = p->heads * p->size, wider = d->width > attended ? d->width : attended;
    const long inner = p->layer->down.inputs;
    const long of_inputs = up_to(rows, 32) * row_bytes(d, inner > wider ? inner : wider);
    const long of_normed = up_to(rows * row_bytes(d, d->width), 64);
    const long of_inner = moe ? moe->gate.outputs * (long)sizeof(float) : row_bytes(d, inner);
    char *all = space(SPACE_OF_PART, of_inputs + of_normed + rows * of_inner);
    if (!all) return 1;
    *bench = (struct bench){all, all + of_inputs, all + of_inputs + of_normed};
    return 0;
}

/* ---- many rows ------------------------------------------------------------------------------------------------------*/

/* The first of a part's rows, and how many there are. */
static long find_rows(const struct pass *p, long part, long *rows) {
    const long first = part * p->rows_each, left = p->d->tokens - first;
    *rows = left < p->rows_each ? left : p->rows_each;
    return first;
}

static void before_attention(void *arguments, long part) {
    const struct pass *p = arguments;
    struct decoder *d = p->d;
    const struct matrix *qkv = &p->layer->qkv;
    struct bench bench;
    long rows, first = find_rows(p, part, &rows);
    if (take_bench(p, rows, &bench)) {
        d->failed = 1;
        return;
    }
    begin_pairs(d->uses_tiles);
    normalize_rms(d, p->layer->attention_norm, p->layer->attention_eps, first, rows, bench.normed);
    struct inputs in = inputs_of((int)qkv->by, d->is_half, bench.normed, rows, d->width, bench.inputs);
    struct finish to = {.is_half = d->is_half, .values = p->qkv + first * row_bytes(d, qkv->outputs)};
    project(qkv, &in, rows, &to);
    end_pairs(d->uses_tiles);
    place_rows(p, first, rows);
}

/* Some rows as a feed-forward that is not one of this file takes them, and the experts that they go to. */
static void hand_over(const struct pass *p, long first, long rows, const struct bench *bench) {
    const struct decoder *d = p->d;
    char *to = (char *)d->out + first * row_bytes(d, d->width);
    normalize_rms(d, p->layer->mlp_norm, p->layer->mlp_eps, first, rows, to);
    if (!p->routes.moe) return;
    begin_pairs(d->uses_tiles);
    choose_experts(&p->routes, first, rows, bench->inputs, (float *)bench->inner);
    end_pairs(d->uses_tiles);
}

static void behind_attention(void *arguments, long part) {
    const struct pass *p = arguments;
    struct decoder *d = p->d;
    const struct decoder_layer *layer = p->layer;
    struct bench bench;
    long rows, first = find_rows(p, part, &rows), attended = p->heads * p->size;
    if (take_bench(p, rows, &bench)) {
        d->failed = 1;
        return;
    }
    struct finish sum = {.is_half = d->is_half, .added = d->hidden + first * d->width};
    const char *from_attention = p->attended + first * row_bytes(d, attended);
    /* Panels add to these rows a few values at a time, which no processor foresees. */
    fetch(sum.added, (size_t)(rows * d->width) * sizeof(float));
    begin_pairs(d->uses_tiles);
    struct inputs in = inputs_of((int)layer->out.by, d->is_half, from_attention, rows, attended, bench.inputs);
    project(&layer->out, &in, rows, &sum);
    if (d->attends_only || layer->moe) {
        end_pairs(d->uses_tiles);
        hand_over(p, first, rows, &bench);
        return;
    }
    normalize_rms(d, layer->mlp_norm, layer->mlp_eps, first, rows, bench.normed);
    in = inputs_of((int)layer->gate_up.by, d->is_half, bench.normed, rows, d->width, bench.inputs);
    project_gated(&layer->gate_up, &in, rows, d->is_half, bench.inner, 0, layer->down.inputs / WIDTH,
                  (struct upcoming){0});
    in = inputs_of((int)layer->down.by, d->is_half, bench.inner, rows, layer->down.inputs, bench.inputs);
    project(&layer->down, &in, rows, &sum);
    end_pairs(d->uses_tiles);
}

/* ---- few rows -------------------------------------------------------------------------------------------------------*/

/* A product of all rows that threads share by panels; gated if there is memory for its values, else as `to` says. */
struct shared_product {
    const struct decoder *d;
    const struct matrix *m, *then; /* then: what rows go through next, or 0 */
    struct inputs in;
    const struct finish *to;
    char *gated;
    long panels, panels_each, parts;
};

static void product_part(void *arguments, long part) {
    const struct shared_product *s = arguments;
    const long first = part * s->panels_each, end = first + s->panels_each, last = end < s->panels ? end : s->panels;
    const long next = first + s->d->threads * s->panels_each;
    struct upcoming then = {0};
    if (next < s->panels) then = (struct upcoming){panel_at(s->m, next), s->gated ? panel_at(s->m, next + s->panels) : 0};
    else if (s->then) then = behind_last(s->then, part + s->d->threads - s->parts, s->d->threads);
    begin_pairs(s->d->uses_tiles);
    if (s->gated) project_gated(s->m, &s->in, s->d->tokens, s->d->is_half, s->gated, first, last, then);
    else project_panels(s->m, &s->in, s->d->tokens, s->to, first, last, then);
    end_pairs(s->d->uses_tiles);
}

static void share_product(const struct decoder *d, const struct matrix *m, const char *rows, char *memory,
                          const struct finish *to, char *gated, const struct matrix *then) {
    const long panels = (gated ? m->outputs / 2 : m->outputs) / WIDTH;
    struct shared_product s = {d, m, then, inputs_of((int)m->by, d->is_half, rows, d->tokens, m->inputs, memory), to,
                               gated, panels, panels_at_once(panels, d->threads), 0};
    s.parts = (panels + s.panels_each - 1) / s.panels_each;
    in_parallel(product_part, &s, s.parts, d->threads);
}

static void hand_over_part(void *arguments, long part) {
    const struct pass *p = arguments;
    struct bench bench;
    long rows, first = find_rows(p, part, &rows);
    if (take_bench(p, rows, &bench)) p->d->failed = 1;
    else hand_over(p, first, rows, &bench);
}

/* ---- all layers -----------------------------------------------------------------------------------------------------*/

static void attend(struct pass *p) {
    struct decoder *d = p->d;
    const void *keys = p->layer->keys, *values = p->layer->values;
    if (d->decode.sequences) {
        struct attention *a = &d->decode;
        a->q = p->qkv, a->out = p->attended, a->keys = keys, a->values = values, a->window = p->layer->window;
        if (d->is_half) attend_bf16(a);
        else attend_f32(a);
        d->failed |= a->failed;
    }
    if (d->prefill.num_tiles) {
        struct prefill *a = &d->prefill;
        a->q = p->qkv, a->out = p->attended, a->keys = keys, a->values = values, a->window = p->layer->window;
        if (d->is_half) prefill_bf16(a);
        else prefill_f32(a);
        d->failed |= a->failed;
    }
}

/* How rows are shared. */
static void divide(struct pass *p) {
    const struct decoder *d = p->d;
    p->is_few = d->tokens < FEW_ROWS;
    const long at_once = p->is_few ? (d->tokens + 1) / 2 : MOST_ROWS * d->threads; /* rows, of all threads */
    const long blocks = (d->tokens + at_once - 1) / at_once * d->threads;
    p->rows_each = (d->tokens + blocks - 1) / blocks;
    p->parts = (d->tokens + p->rows_each - 1) / p->rows_each;
}

/* Rows that nobody asks for have left their keys and values; the others close up. */
static void keep_wanted(struct pass *p) {
    struct decoder *d = p->d;
    const long sums = d->width * (long)sizeof(float), attended = row_bytes(d, p->heads * p->size);
    for (long i = 0; i < d->num_wanted; i++) {
        if (d->wanted[i] == i) continue;
        memcpy((char *)d->hidden + i * sums, (char *)d->hidden + d->wanted[i] * sums, (size_t)sums);
        memcpy(p->attended + i * attended, p->attended + d->wanted[i] * attended, (size_t)attended);
    }
    d->tokens = d->num_wanted;
    d->drops_others = 0;
    if (d->tokens) divide(p);
}

/* To the experts of a layer; 1 if there is no memory for the routes. */
static int find_routes(struct pass *p) {
    struct decoder *d = p->d;
    const struct moe *moe = d->attends_only ? 0 : p->layer->moe;
    p->routes = (struct routes){.moe = moe, .rows = d->out, .sums = d->hidden, .tokens = d->tokens, .width = d->width,
                                .rows_each = p->rows_each, .is_half = d->is_half, .uses_tiles = d->uses_tiles,
                                .threads = d->threads};
    if (!moe) return 0;
    p->routes.then = p->is_few && p->next ? &p->next->qkv : 0;
    p->routes.slots = d->expert_slots + moe->layer * moe->experts;
    p->routes.loads = d->loads + moe->layer * moe->experts;
    return take_routes(&p->routes);
}

static void few_before_attention(struct pass *p) {
    struct decoder *d = p->d;
    const struct decoder_layer *layer = p->layer;
    struct finish plain = {.is_half = d->is_half, .values = p->qkv};
    struct bench bench;
    if (take_bench(p, d->tokens, &bench)) {
        d->failed = 1;
        return;
    }
    normalize_rms(d, layer->attention_norm, layer->attention_eps, 0, d->tokens, bench.normed);
    share_product(d, &layer->qkv, bench.normed, bench.inputs, &plain, 0, &layer->out);
    place_rows(p, 0, d->tokens);
}

static void few_behind_attention(struct pass *p) {
    struct decoder *d = p->d;
    const struct decoder_layer *layer = p->layer;
    struct finish sum = {.is_half = d->is_half, .added = d->hidden};
    struct bench bench;
    if (take_bench(p, d->tokens, &bench)) {
        d->failed = 1;
        return;
    }
    const int hands_over = d->attends_only || layer->moe;
    share_product(d, &layer->out, p->attended, bench.inputs, &sum, 0, hands_over ? 0 : &layer->gate_up);
    if (hands_over) {
        in_parallel(hand_over_part, p, p->parts, d->threads);
        return;
    }
    normalize_rms(d, layer->mlp_norm, layer->mlp_eps, 0, d->tokens, bench.normed);
    share_product(d, &layer->gate_up, bench.normed, bench.inputs, 0, bench.inner, &layer->down);
    share_product(d, &layer->down, bench.inner, bench.inputs, &sum, 0, p->next ? &p->next->qkv : 0);
}

static void run_layer(struct pass *p) {
    struct decoder *d = p->d;
    p->routes.moe = 0;
    if (p->is_few) few_before_attention(p);
    else in_parallel(before_attention, p, p->parts, d->threads);
    if (d->failed) return;
    attend(p);
    if (!p->next && d->drops_others) keep_wanted(p);
    if (!d->tokens) return;
    if (find_routes(p)) {
        d->failed = 1;
        return;
    }
    if (p->is_few) few_behind_attention(p);
    else in_parallel(behind_attention, p, p->parts, d->threads);
    if (p->routes.moe && !d->failed) d->failed = visit_experts(&p->routes);
}

void decode(struct decoder *d) {
    struct pass p = {.d = d, .heads = d->decode.heads, .key_heads = d->decode.key_heads, .size = d->decode.size};
    const long of_qkv = up_to(d->tokens * row_bytes(d, (p.heads + 2 * p.key_heads) * p.size), 64);
    if (!d->tokens) return;
    p.qkv = space(SPACE_OF_RUN, of_qkv + d->tokens * row_bytes(d, p.heads * p.size));
    if (!p.qkv) {
        d->failed = 1;
        return;
    }
    p.attended = p.qkv + of_qkv;
    divide(&p);
    for (long number = 0; number < d->num_layers && !d->failed; number++) {
        p.layer = d->layers + number;
        p.next = number + 1 < d->num_layers ? p.layer + 1 : 0;
        run_layer(&p);
    }
    if (!d->attends_only) normalize_rms(d, d->norm, d->eps, 0, d->tokens, d->out);
}

/* ---- scores ---------------------------------------------------------------------------------------------------------*/

/* Scores of the next token: float32 values of a product with rows of bfloat16. */
struct scores {
    struct matrix head;
    const void *rows;
    float *out; /* [count, outputs of head] */
    long count;
    int threads, failed;
};

void score(struct scores *s) {
    struct decoder d = {.tokens = s->count, .is_half = 1, .uses_tiles = tiles_allowed, .threads = s->threads};
    struct finish to = {.values = (char *)s->out};
    char *memory = space(SPACE_OF_PART, up_to(s->count, 32) * s->head.inputs * (long)sizeof(bf16));
    if (memory) share_product(&d, &s->head, s->rows, memory, &to, 0, 0);
    else s->failed = 1;
}
