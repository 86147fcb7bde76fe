/* Scores of one token per sequence by matrix tiles (AMX), for kernels.c, which includes this: keys times queries, 16 keys
 * at a time, since keys lie in the cache as rows of a tile do.
 */

static _Thread_local int declared_group;

/* 0 to 3: scores of 16 keys by heads; 4: keys; 6: queries in pairs of values. */
static void declare_scores(int group) {
    if (declared_group == group) return;
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = TILE_ROWS;
        shapes.row_bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? 64 : 4 * group);
    }
    STORED();
    _tile_loadconfig(&shapes);
    declared_group = group;
}

/* After a task's scores, before anybody else uses tiles. */
static void end_scores(void) {
    if (declared_group) _tile_release();
    declared_group = 0;
}

/* scores [group, DECODE_PIECE] of the piece's tokens; 0, and nothing done, where keys or heads do not lie as tiles need them.
 * Behind the piece's last token, scores of whatever its block holds are written. `heads` are queries, group by size. */
static int score_by_tiles(const struct attention *a, const bf16 *keys, const struct piece *now, const bf16 *heads,
                          int group, float *scores) {
    const long size = a->size, row = a->key_heads * size;
    if (!tiles_allowed || size % 32 || a->block_size % TILE_ROWS || now->slots[0] % TILE_ROWS) return 0;
    uint32_t pairs[MAX_SIZE / 2][MAX_GROUP];
    float turned[DECODE_PIECE * MAX_GROUP] __attribute__((aligned(64)));
    for (int g = 0; g < group; g++)
        for (long i = 0; i < size / 2; i++) memcpy((uint32_t *)pairs + i * group + g, heads + g * size + 2 * i, 4);
    declare_scores(group);
    STORED();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define KEYS(C, t)                                                                                                     \
    if (t < now->count) {                                                                                              \
        _tile_loadd(4, keys + now->slots[t] * row + i, 2 * row);                                                       \
        _tile_dpbf16ps(C, 4, 6);                                                                                       \
    }
    for (long i = 0; i < size; i += 2 * TILE_PAIRS) {
        _tile_loadd(6, (uint32_t *)pairs + i / 2 * group, 4 * group);
        KEYS(0, 0)
        KEYS(1, 16)
        KEYS(2, 32)
        KEYS(3, 48)
    }
#undef KEYS
    _tile_stored(0, turned, 4 * group);
    _tile_stored(1, turned + 16 * group, 4 * group);
    _tile_stored(2, turned + 32 * group, 4 * group);
    _tile_stored(3, turned + 48 * group, 4 * group);
    const __m512i places = _mm512_mullo_epi32(_mm512_set1_epi32(group), _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7,
                                                                                       6, 5, 4, 3, 2, 1, 0));
    for (int g = 0; g < group; g++)
        for (int t = 0; t < now->count; t += LANES) {
            __m512 found = _mm512_i32gather_ps(places, turned + t * group + g, 4);
            _mm512_storeu_ps(scores + g * DECODE_PIECE + t, found * splat(a->scale));
        }
    return 1;
}
