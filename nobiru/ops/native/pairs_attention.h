/* Attention of one token per sequence by products of pairs of bfloat16 values, for kernels.c, which includes this. Without
 * matrix tiles, and where keys do not lie as those need them, scores are made here too.
 */

/* The sums of 16 vectors, in their order. Each step adds the halves of two vectors of sums into one. */
INLINE __m512 totals(const __m512 *x) {
    __m512 twos[8], fours[4], eights[2];
    UNROLL for (int i = 0; i < 8; i++)
        twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d left = (__m512d)twos[2 * i], right = (__m512d)twos[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(left, right), (__m512)_mm512_unpackhi_pd(left, right));
    }
    UNROLL for (int i = 0; i < 2; i++)
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                         _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
}

/* As score_by_tiles, for heads of any whole number of 32 values; fetches the next piece's keys. */
static int score_by_pairs(const struct attention *a, const bf16 *keys, const struct piece *now,
                          const struct piece *next, const bf16 *heads, int group, float *scores) {
    if (score_by_tiles(a, keys, now, heads, group, scores)) return 1;
    const long size = a->size, row = a->key_heads * size;
    if (size % 32) return 0;
    for (int t = 0; t < now->count; t += 16) {
        const bf16 *rows[16];
        for (int i = 0; i < 16; i++) rows[i] = keys + now->slots[t + i < now->count ? t + i : t] * row;
        for (int g = 0; g < group; g++) {
            __m512 sums[16];
            UNROLL for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
            for (int i = g * 16 / group; i < (g + 1) * 16 / group && t + i < next->count; i++)
                fetch(keys + next->slots[t + i] * row, size * sizeof(bf16));
            for (long at = 0; at < size; at += 32) {
                __m512bh query = (__m512bh)_mm512_loadu_si512(heads + g * size + at);
                UNROLL for (int i = 0; i < 16; i++)
                    sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)_mm512_loadu_si512(rows[i] + at), query);
            }
            _mm512_storeu_ps(scores + g * DECODE_PIECE + t, _mm512_mul_ps(totals(sums), _mm512_set1_ps(a->scale)));
        }
    }
    return 1;
}

/* mixed [group, size] = mixed * shrink + weights @ values of the piece, 32 values at a time; fetches the next values. */
INLINE void mix_pairs(const int group, const struct attention *a, const bf16 *values, const struct piece *now,
                      const struct piece *next, const float *scores, const float *shrink, float *mixed) {
    const long size = a->size, row = a->key_heads * size;
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    uint32_t weights[MAX_GROUP][DECODE_PIECE / 2];
    for (int g = 0; g < group; g++)
        for (int t = 0; t < now->count; t += 16) /* behind the last token scores are 0 */
            _mm256_storeu_si256((__m256i *)(weights[g] + t / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(scores + g * DECODE_PIECE + t)));
    for (long at = 0; at < size; at += 32) {
        __m512 low[MAX_GROUP], high[MAX_GROUP];
        UNROLL for (int g = 0; g < group; g++) low[g] = high[g] = _mm512_setzero_ps();
        for (int t = 0; t < now->count; t += 2) {
            const int other = t + 1 < now->count ? t + 1 : t;
            if (at == 0)
                for (int ahead = t; ahead < t + 2 && ahead < next->count; ahead++)
                    fetch(values + next->slots[ahead] * row, size * sizeof(bf16));
            __m512i even = _mm512_loadu_si512(values + now->slots[t] * row + at);
            __m512i odd = _mm512_loadu_si512(values + now->slots[other] * row + at);
            __m512bh left = (__m512bh)_mm512_unpacklo_epi16(even, odd), right = (__m512bh)_mm512_unpackhi_epi16(even, odd);
            UNROLL for (int g = 0; g < group; g++) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32((int)weights[g][t / 2]);
                low[g] = _mm512_dpbf16_ps(low[g], pair, left);
                high[g] = _mm512_dpbf16_ps(high[g], pair, right);
            }
        }
        /* Unpacking took four values of each quarter in turn. */
        UNROLL for (int g = 0; g < group; g++) {
            float *to = mixed + g * size + at;
            __m512 factor = _mm512_set1_ps(shrink[g]);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_loadu_ps(to), factor, _mm512_permutex2var_ps(low[g], first, high[g])));
            _mm512_storeu_ps(to + 16, _mm512_fmadd_ps(_mm512_loadu_ps(to + 16), factor,
                                                      _mm512_permutex2var_ps(low[g], second, high[g])));
        }
    }
}

static int mix_by_pairs(const struct attention *a, const bf16 *values, const struct piece *now,
                        const struct piece *next, int group, const float *scores, const float *shrink, float *mixed) {
    if (a->size % 32) return 0;
    switch (group) {
        case 1: mix_pairs(1, a, values, now, next, scores, shrink, mixed); break;
        case 2: mix_pairs(2, a, values, now, next, scores, shrink, mixed); break;
        case 3: mix_pairs(3, a, values, now, next, scores, shrink, mixed); break;
        default: mix_pairs(4, a, values, now, next, scores, shrink, mixed);
    }
    return 1;
}
