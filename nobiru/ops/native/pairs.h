/* Products of small matrices of bfloat16 values in pairs, by vectors or by matrix tiles (AMX), for kernels.c, which includes
 * this.
 *
 * c [16 or 32 rows, 16 or 32 columns] = a @ b, or is added to. a has `a_stride` bytes from row to row, and `a_step` from
 * 64 bytes of a row to the next 64. b is tiles of 16 rows of 16 pairs, `b_row` bytes from row to row and `b_step` from tile
 * to tile; `left` and `right` are its two columns of tiles.
 */

struct factors {
    const void *a, *left, *right; /* right 0: 16 columns */
    long a_stride, a_step, b_row, b_step, steps, c_stride;
    int rows;                     /* up to 32 */
    void *c;
    int adds;
};

INLINE void pairs_by_vectors(const struct factors *f, const int rows, const int columns, const char *a, char *c) {
    __m512 sums[8][2];
    UNROLL for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    if (f->adds)
        UNROLL for (int r = 0; r < rows; r++) {
            sums[r][0] = _mm512_loadu_ps(c + r * f->c_stride);
            if (columns == 2) sums[r][1] = _mm512_loadu_ps(c + r * f->c_stride + 64);
        }
    const char *left_row = f->left, *right_row = f->right;
    for (long step = 0; step < f->steps; step++, a += f->a_step, left_row += f->b_step, right_row += f->b_step)
        for (long k = 0; k < 16; k++) {
            __m512bh left = (__m512bh)_mm512_loadu_si512(left_row + k * f->b_row), right = left;
            if (columns == 2) right = (__m512bh)_mm512_loadu_si512(right_row + k * f->b_row);
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, a + r * f->a_stride + k * 4, 4);
                __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], value, left);
                if (columns == 2) sums[r][1] = _mm512_dpbf16_ps(sums[r][1], value, right);
            }
        }
    UNROLL for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(c + r * f->c_stride, sums[r][0]);
        if (columns == 2) _mm512_storeu_ps(c + r * f->c_stride + 64, sums[r][1]);
    }
}

static void multiply_pairs(const struct factors *f) {
    for (int row = 0; row < f->rows; row += 8) {
        const char *a = (const char *)f->a + row * f->a_stride;
        char *c = (char *)f->c + row * f->c_stride;
        if (f->right) pairs_by_vectors(f, 8, 2, a, c);
        else pairs_by_vectors(f, 8, 1, a, c);
    }
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1
/* All eight tiles are whole. By the instruction DOT, for elements of any kind; c has as many rows as whole tiles. */
#define MULTIPLY_TILES(NAME, DOT)                                                                                      \
    static void NAME(const struct factors *f) {                                                                        \
        const char *upper = f->a, *lower = upper + 16 * f->a_stride, *left = f->left, *right = f->right;               \
        char *c = f->c;                                                                                                \
        const int two_rows = f->rows > 16;                                                                             \
        STORED();                                                                                                      \
        if (f->adds) {                                                                                                 \
            _tile_loadd(0, c, f->c_stride);                                                                            \
            if (right) _tile_loadd(1, c + 64, f->c_stride);                                                            \
            if (two_rows) _tile_loadd(2, c + 16 * f->c_stride, f->c_stride);                                           \
            if (two_rows && right) _tile_loadd(3, c + 16 * f->c_stride + 64, f->c_stride);                             \
        } else {                                                                                                       \
            _tile_zero(0);                                                                                             \
            _tile_zero(1);                                                                                             \
            _tile_zero(2);                                                                                             \
            _tile_zero(3);                                                                                             \
        }                                                                                                              \
        if (two_rows && right) {                                                                                       \
            for (long k = 0; k < f->steps; k++, left += f->b_step, right += f->b_step) {                               \
                _tile_loadd(6, left, f->b_row);                                                                        \
                _tile_loadd(4, upper + k * f->a_step, f->a_stride);                                                           \
                DOT(0, 4, 6);                                                                                          \
                _tile_loadd(7, right, f->b_row);                                                                       \
                DOT(1, 4, 7);                                                                                          \
                _tile_loadd(5, lower + k * f->a_step, f->a_stride);                                                           \
                DOT(2, 5, 6);                                                                                          \
                DOT(3, 5, 7);                                                                                          \
            }                                                                                                          \
        } else {                                                                                                       \
            for (long k = 0; k < f->steps; k++) {                                                                      \
                _tile_loadd(6, left + k * f->b_step, f->b_row);                                                        \
                _tile_loadd(4, upper + k * f->a_step, f->a_stride);                                                           \
                DOT(0, 4, 6);                                                                                          \
                if (right) {                                                                                           \
                    _tile_loadd(7, right + k * f->b_step, f->b_row);                                                   \
                    DOT(1, 4, 7);                                                                                      \
                }                                                                                                      \
                if (two_rows) {                                                                                        \
                    _tile_loadd(5, lower + k * f->a_step, f->a_stride);                                                       \
                    DOT(2, 5, 6);                                                                                      \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        _tile_stored(0, c, f->c_stride);                                                                               \
        if (f->right) _tile_stored(1, c + 64, f->c_stride);                                                            \
        if (two_rows) {                                                                                                \
            _tile_stored(2, c + 16 * f->c_stride, f->c_stride);                                                        \
            if (f->right) _tile_stored(3, c + 16 * f->c_stride + 64, f->c_stride);                                     \
        }                                                                                                              \
        STORED();                                                                                                      \
    }

MULTIPLY_TILES(multiply_pair_tiles, _tile_dpbf16ps)
MULTIPLY_TILES(multiply_byte_tiles, _tile_dpbusd)
#endif

INLINE void multiply_by(int uses_tiles, const struct factors *f) {
#ifdef HAS_TILES
    if (uses_tiles) {
        multiply_pair_tiles(f);
        return;
    }
#endif
    (void)uses_tiles;
    multiply_pairs(f);
}

/* e to the power of x for x <= 0, within 3 parts of a million; what is below -100 counts as that. */
INLINE __m512 weight_of(__m512 x) {
    x = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-100.0f)), _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 y = _mm512_fmadd_ps(_mm512_set1_ps(0.00956051f), r, _mm512_set1_ps(0.05591704f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.24024981f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.69312197f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f)), n);
}

/* Around products by tiles: a thread's tiles are declared before, all of them whole, and released after. */
INLINE void begin_pairs(int uses_tiles) {
#ifdef HAS_TILES
    if (uses_tiles) declare_tiles(TILE_ROWS, TILE_ROWS);
#endif
    (void)uses_tiles;
}
INLINE void end_pairs(int uses_tiles) {
#ifdef HAS_TILES
    if (uses_tiles) _tile_release();
#endif
    (void)uses_tiles;
}
