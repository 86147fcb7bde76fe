/* What layers of experts do beyond kernels.c, which includes this: products with several weights at once, each for its
 * own rows, and the weighted sum of what a token's experts gave.
 */

struct grouped {
    struct linear all;            /* of the first weight and the first row */
    const int64_t *slots, *starts; /* group g is rows starts[g] to starts[g + 1], by weight number slots[g] */
    long slot_size, parts_each;   /* values from weight to weight; parts of a group */
};

#define GROUPED(NAME, WEIGHT, X, Y)                                                                                    \
    static void grouped_##NAME##_part(void *arguments, long part) {                                                    \
        const struct grouped *g = arguments;                                                                           \
        long group = part / g->parts_each, start = g->starts[group];                                                   \
        struct linear one = g->all;                                                                                    \
        one.weight = (const WEIGHT *)one.weight + g->slots[group] * g->slot_size;                                      \
        one.x = (const X *)one.x + start * one.stride;                                                                 \
        one.y = (Y *)one.y + start * one.outputs;                                                                      \
        one.rows = g->starts[group + 1] - start;                                                                       \
        NAME##_part(&one, part % g->parts_each);                                                                       \
    }                                                                                                                  \
    void grouped_##NAME(const WEIGHT *weights, long slot_size, const int64_t *slots, const int64_t *starts,            \
                        long groups, const X *x, long stride, Y *y, long inputs, long outputs, int threads) {          \
        long panels = (outputs + WIDTH - 1) / WIDTH, each = panels_at_once(groups * panels, threads);                  \
        long parts_each = (panels + each - 1) / each;                                                                  \
        struct linear all = {weights, x, 0, y, stride, 0, inputs, outputs, panels, each};                              \
        struct grouped g = {all, slots, starts, slot_size, parts_each};                                                \
        in_parallel(grouped_##NAME##_part, &g, groups * parts_each, threads);                                          \
    }

GROUPED(linear_f32, float, float, float)
GROUPED(linear_bf16, bf16, float, float)
#ifdef __AVX512BF16__
GROUPED(linear_pairs, bf16, bf16, bf16)
#endif

struct sum {
    struct rows rows;
    const int64_t *places;
    const float *weights;
    long terms;
};

/* out[r] = the sum over k of weights[r, k] * x[places[r, k]], added in the order of k, in float32 */
#define SUM(T, LOAD, STORE)                                                                                            \
    static void weighted_sum_part_##T(void *arguments, long part) {                                                    \
        const struct sum *s = arguments;                                                                               \
        const struct rows *a = &s->rows;                                                                               \
        EACH_ROW(r, a, part)                                                                                           \
            for (long i = 0; i < a->size; i += LANES) {                                                                \
                vec sum = {0};                                                                                         \
                for (long k = r * s->terms; k < (r + 1) * s->terms; k++)                                               \
                    sum += LOAD((const T *)a->x + s->places[k] * a->size + i) * s->weights[k];                         \
                STORE((T *)a->out + r * a->size + i, sum);                                                             \
            }                                                                                                          \
    }                                                                                                                  \
    void weighted_sum_##T(const T *x, const int64_t *places, const float *weights, T *out, long rows, long terms,      \
                          long size, int threads) {                                                                    \
        struct sum s = {{.x = x, .out = out, .rows = rows, .size = size}, places, weights, terms};                     \
        share_rows(weighted_sum_part_##T, &s.rows, threads);                                                           \
    }

SUM(f32, load_f32, store_f32)
SUM(bf16, load_bf16, store_bf16)
