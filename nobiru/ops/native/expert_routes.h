/* The way of a step's rows to the experts of a layer and back, for decoder_layers.h. kernels.c includes this.
 *
 * A gate scores all experts, and each row goes to the `top_k` whose scores are highest; softmax over all scores says what
 * each of them counts. Rows are gathered by expert, computed by expert_layers.h, and what a row's experts gave is added
 * up, in float32 and from the best expert down.
 */

/* Experts of one layer, and their gate, whose outputs are filled up to whole panels. */
struct moe {
    struct matrix gate, gate_up, down; /* the last two are those of slot 0 */
    long layer, experts, slot_bytes, top_k; /* layers with experts count from 0 */
    int normalizes, rounds;                 /* weights: to a sum of 1; to bfloat16 if hidden states are */
};

struct routes {
    const struct moe *moe;
    const struct matrix *then; /* as in struct experts */
    const char *rows;     /* [tokens, width] */
    const int64_t *slots; /* [experts] */
    int64_t *loads;       /* [experts]: how many rows each gets */
    int64_t *places;      /* [tokens, top_k]: experts from the best down, then where they have the row in `sorted` */
    float *weights;       /* [tokens, top_k] */
    int64_t *group_slots, *starts; /* as in struct experts */
    int64_t *next;        /* [experts]: the next place among the rows of each */
    char *sorted;         /* [tokens * top_k, width]: rows by expert, then what these made of them */
    float *sums;          /* [tokens, width]: what experts gave is added here */
    long tokens, width, groups, rows_each;
    int is_half, uses_tiles, threads;
};

/* Memory for all that is on the way; 1 if there is none. */
static int take_routes(struct routes *r) {
    const long all = r->tokens * r->moe->top_k, experts = r->moe->experts, row = r->width * value_bytes(r->is_half);
    const long of_sorted = up_to(all * row, 64), of_numbers = (all + 3 * experts + 1) * (long)sizeof(int64_t);
    r->sorted = space(SPACE_OF_ROUTES, of_sorted + of_numbers + all * (long)sizeof(float));
    if (!r->sorted) return 1;
    r->places = (int64_t *)(r->sorted + of_sorted);
    r->group_slots = r->places + all, r->starts = r->group_slots + experts;
    r->next = r->starts + experts + 1;
    r->weights = (float *)(r->next + experts);
    return 0;
}

/* One row's experts, of equal scores the first, and their weights. Scores become weights of all experts. */
static void choose_best(const struct routes *r, float *scores, int64_t *best, float *weights) {
    const struct moe *m = r->moe;
    const long outputs = m->gate.outputs;
    for (long i = 0; r->is_half && i < outputs; i += LANES) { /* as layers in bfloat16 have them */
        bf16 rounded[LANES];
        store_bf16(rounded, load_f32(scores + i));
        store_f32(scores + i, load_bf16(rounded));
    }
    for (long i = m->experts; i < outputs; i++) scores[i] = -INFINITY;
    for (long expert = 0; expert < m->experts; expert++) {
        long k = expert < m->top_k ? expert : m->top_k;
        for (; k && scores[expert] > scores[best[k - 1]]; k--)
            if (k < m->top_k) best[k] = best[k - 1];
        if (k < m->top_k) best[k] = expert;
    }
    const float top = scores[best[0]];
    vec added = {0};
    for (long i = 0; i < outputs; i += LANES) {
        vec power = power_of_e(load_f32(scores + i) - top);
        store_f32(scores + i, power);
        added += power;
    }
    float sum = total(added), of_best = 0;
    for (long k = 0; k < m->top_k; k++) of_best += weights[k] = scores[best[k]] / sum;
    for (long k = 0; k < m->top_k; k++) {
        if (m->normalizes) weights[k] /= of_best;
        if (m->rounds && r->is_half) {
            const uint32_t bits = (uint32_t)to_bf16(weights[k]) << 16;
            memcpy(weights + k, &bits, 4);
        }
    }
}

/* Of some rows. `inputs` and `scores` is memory for as many, the latter with a score for each output of the gate. */
static void choose_experts(const struct routes *r, long first, long rows, char *inputs, float *scores) {
    const struct matrix *gate = &r->moe->gate;
    const char *x = r->rows + first * r->width * value_bytes(r->is_half);
    struct inputs in = inputs_of((int)gate->by, r->is_half, x, rows, r->width, inputs);
    struct finish to = {.values = (char *)scores};
    project(gate, &in, rows, &to);
    for (long row = 0; row < rows; row++) {
        const long at = (first + row) * r->moe->top_k;
        choose_best(r, scores + row * gate->outputs, r->places + at, r->weights + at);
    }
}

/* Loads, groups and places; an expert's rows stay in their order. */
static void sort_by_expert(struct routes *r) {
    const long all = r->tokens * r->moe->top_k, experts = r->moe->experts;
    int64_t start = 0;
    memset(r->loads, 0, (size_t)experts * sizeof(int64_t));
    for (long i = 0; i < all; i++) r->loads[r->places[i]]++;
    r->groups = 0;
    for (long expert = 0; expert < experts; start += r->loads[expert++]) {
        r->next[expert] = start;
        if (r->loads[expert]) r->group_slots[r->groups] = r->slots[expert], r->starts[r->groups++] = start;
    }
    r->starts[r->groups] = all;
    for (long i = 0; i < all; i++) r->places[i] = r->next[r->places[i]]++;
}

#define EACH_PLACE(r, token, part)                                                                                     \
    for (long token = part * r->rows_each; token < r->tokens && token < (part + 1) * r->rows_each; token++)

static void gather_part(void *arguments, long part) {
    const struct routes *r = arguments;
    const long row = r->width * value_bytes(r->is_half), top_k = r->moe->top_k;
    EACH_PLACE(r, token, part)
        for (long k = 0; k < top_k; k++)
            memcpy(r->sorted + r->places[token * top_k + k] * row, r->rows + token * row, (size_t)row);
}

static void add_part(void *arguments, long part) {
    const struct routes *r = arguments;
    const long top_k = r->moe->top_k;
    EACH_PLACE(r, token, part) {
        const int64_t *places = r->places + token * top_k;
        const float *weights = r->weights + token * top_k;
        float *sums = r->sums + token * r->width;
        for (long i = 0; i < r->width; i += LANES) {
            vec sum = {0};
            for (long k = 0; k < top_k; k++) sum += get(r->is_half, r->sorted, places[k] * r->width + i) * weights[k];
            store_f32(sums + i, load_f32(sums + i) + sum);
        }
    }
}

/* Behind the choice of all rows: to their experts, through them and back; 1 if there is no memory. */
static int visit_experts(struct routes *r) {
    const struct moe *m = r->moe;
    const long parts = (r->tokens + r->rows_each - 1) / r->rows_each;
    sort_by_expert(r);
    in_parallel(gather_part, r, parts, r->threads);
    struct experts e = {.gate_up = m->gate_up, .down = m->down, .slots = r->group_slots, .starts = r->starts,
                        .rows = r->sorted, .out = r->sorted, .groups = r->groups, .slot_bytes = m->slot_bytes,
                        .then = r->then,
                        .threads = r->threads, .is_half = r->is_half, .uses_tiles = r->uses_tiles};
    compute_experts(&e);
    in_parallel(add_part, r, parts, r->threads);
    return e.failed;
}
