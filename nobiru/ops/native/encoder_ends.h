/* What stands in front of an encoder's layers and behind them: sums of embeddings, normalized, and weighted sums of a
 * sequence's tokens. kernels.c includes this. */

struct embeddings {
    const void *words, *positions; /* [words, width], [positions, width]: float32 or bfloat16 */
    const int32_t *ids;            /* [tokens]: rows of words */
    const int64_t *places;         /* [tokens]: rows of positions */
    void *hidden;                  /* [tokens, width], as positions */
    struct norm norm;
    long tokens, width;
    int has_half_words, is_half, threads, failed;
};

#define ROWS_OF_PART 64

INLINE void add_rows(int has_half_words, int is_half, const char *word, const char *position, long width, float *sum) {
    for (long i = 0; i < width; i += LANES) store_f32(sum + i, get(has_half_words, word, i) + get(is_half, position, i));
}

static void embed_part(void *arguments, long part) {
    struct embeddings *e = arguments;
    const long bytes = e->width * value_bytes(e->is_half), of_word = e->width * value_bytes(e->has_half_words);
    const long first = part * ROWS_OF_PART, end = first + ROWS_OF_PART < e->tokens ? first + ROWS_OF_PART : e->tokens;
    float *sums = room(ROWS_OF_PART * e->width);
    if (!sums) {
        e->failed = 1;
        return;
    }
    for (long t = first; t < end; t++) {
        const char *word = (const char *)e->words + e->ids[t] * of_word, *position = (const char *)e->positions + e->places[t] * bytes;
        const char *next = t + 1 < end ? (const char *)e->words + e->ids[t + 1] * of_word : word;
        for (long i = 0; i < of_word; i += 64) __builtin_prefetch(next + i); /* rows lie anywhere */
        float *sum = sums + (t - first) * e->width;
        if (e->has_half_words) add_rows(1, e->is_half, word, position, e->width, sum);
        else add_rows(0, e->is_half, word, position, e->width, sum);
    }
    normalize(e->is_half, &e->norm, sums, end - first, e->width, (char *)e->hidden + first * bytes);
}

void embed(struct embeddings *e) {
    in_parallel(embed_part, e, (e->tokens + ROWS_OF_PART - 1) / ROWS_OF_PART, e->threads);
}

struct token_sums {
    const void *hidden;    /* [tokens, width]: float32 or bfloat16 */
    const float *weights;  /* [tokens] */
    const int64_t *starts; /* [sequences + 1] */
    float *sums;           /* [sequences, width] */
    long sequences, width;
    int is_half, threads;
};

static void sum_sequence(void *arguments, long sequence) {
    const struct token_sums *s = arguments;
    float *sum = s->sums + sequence * s->width;
    for (long i = 0; i < s->width; i += LANES) {
        vec added = {0};
        for (long t = s->starts[sequence]; t < s->starts[sequence + 1]; t++)
            added += get(s->is_half, s->hidden, t * s->width + i) * s->weights[t];
        store_f32(sum + i, added);
    }
}

void sum_tokens(struct token_sums *s) { in_parallel(sum_sequence, s, s->sequences, s->threads); }
